# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""Parameters that are sharded by their rows, as in FSDP2, and unshard with one all-gather."""

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import all_gather_single


class RowShards:
    """The parameters of a unit, of one dtype, each sharded along its first dimension as torch.chunk does.

    Shape: shards[i] is [this rank's rows, *parameters[i].shape[1:]].
    Memory: this rank's rows; between unshard() and reshard(), the parameters, too.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        self.world_size = dist.get_world_size(group)
        self.shards = [self._own_rows(parameter.detach()).clone() for parameter in parameters]

    def _own_rows(self, full: torch.Tensor) -> torch.Tensor:
        chunks, rank = full.chunk(self.world_size), dist.get_rank(self.group)
        return chunks[rank] if rank < len(chunks) else full[:0]

    @torch.no_grad()
    def unshard(self) -> None:
        """Fill the parameters with the rows of all ranks. Communication: one all-gather."""
        slot = self.copy_in()
        gathered = slot.new_empty(self.world_size * slot.numel())
        all_gather_single(gathered, slot, group=self.group)
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(parameter.nbytes)
        self.copy_out(gathered)

    def reshard(self) -> None:
        """Free the memory of the parameters."""
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(0)

    def copy_in(self) -> torch.Tensor:
        """Put this rank's rows of all parameters side by side, padded to as many elements as every rank sends."""
        pieces = []
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            padded = shard.new_zeros(self._slot_rows(parameter), *parameter.shape[1:])
            padded[: len(shard)] = shard
            pieces.append(padded.flatten())
        return torch.cat(pieces)

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Copy the rows of each parameter out of the slots of all ranks, without the padding."""
        slots, first = gathered.view(self.world_size, -1), 0
        for parameter in self.parameters:
            numel = self._slot_rows(parameter) * parameter[0].numel()
            # Only the last ranks have padding, so it follows all rows.
            rows = slots[:, first : first + numel].flatten()[: parameter.numel()]
            parameter.copy_(rows.view(parameter.shape))
            first += numel

    def _slot_rows(self, parameter: nn.Parameter) -> int:
        return -(-len(parameter) // self.world_size)  # rounded up
