# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""The layout of a flat tensor that holds several parameters, or their gradients, and is sharded over the ranks."""

import torch
import torch.distributed as dist
from torch import nn


class FlatLayout:
    """Where each parameter lies in a flat tensor, and which shard of the flat tensor this rank owns.

    Parameters lie side by side, padded at the end to a multiple of the group's world size N. Rank r owns the r-th of N
    equal shards, which may begin and end in the middle of a parameter.

    Shape: flat tensors are [N · n], shards [n].
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        self.numel = sum(parameter.numel() for parameter in parameters)

    @property
    def shard_shape(self) -> torch.Size:
        return torch.Size([-(-self.numel // dist.get_world_size(self.group))])

    def new_flat(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a flat tensor of zeros on the parameters' device, by default of their dtype."""
        padded_numel = dist.get_world_size(self.group) * self.shard_shape.numel()
        return self.parameters[0].new_zeros(padded_numel, dtype=dtype)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View each parameter's slice of flat in the parameter's shape."""
        slices = flat[: self.numel].split([parameter.numel() for parameter in self.parameters])
        return [one.view(parameter.shape) for one, parameter in zip(slices, self.parameters, strict=True)]

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this rank's shard of flat."""
        return flat.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
