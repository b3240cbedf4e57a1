# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""Deferred initialization: a model on the meta device is sharded, and then only this rank's shards are materialized."""

import contextlib
import zlib
from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from solutions.flat import FlatLayout
from solutions.units import ShardedFlatParameter


def seed_of(seed: int, name: str) -> int:
    """Return a seed for each name. Python's hash() of a string would differ from process to process."""
    return zlib.crc32(f"{seed}.{name}".encode())


@contextlib.contextmanager
def seeded(seed: int, device: torch.device):
    """Seed torch's generators for the with-block, and restore their states at its end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Materializer:
    """Gives tensors of a module on the meta device memory and values.

    The values of a tensor depend on the seed and on its name, but not on the number of ranks or on the units.

    Args:
        module: the module that has the tensors as parameters or buffers.
        initialize: initialize(name, tensor) fills a tensor in place. A tied parameter has its first name.
        device: where to allocate memory. A GPU draws other random values than a CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        initialize: Callable[[str, torch.Tensor], object],
        device: torch.device | str,
        seed: int = 0,
    ):
        self.initialize, self.device, self.seed = initialize, torch.device(device), seed
        named = chain(module.named_parameters(), module.named_buffers())
        self.name_of = {tensor: name for name, tensor in named}

    @torch.no_grad()
    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor on self.device, of the shape and dtype of one on the meta device, with its values."""
        name, value = self.name_of[tensor], torch.empty_like(tensor, device=self.device)
        with seeded(seed_of(self.seed, name), self.device):
            self.initialize(name, value)
        return value

    def fill_buffers(self, module: nn.Module) -> None:
        """Materialize the module's buffers that are on the meta device. They stay the same objects."""
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                # Tensors that have weak references cannot be swapped.
                layer._flat_weight_refs = [None] * len(layer._flat_weights_names)
        for buffer in module.buffers():
            if buffer.is_meta:
                torch.utils.swap_tensors(buffer, self.value_of(buffer))

    @torch.no_grad()
    def shard_of(self, layout: FlatLayout) -> torch.Tensor:
        """Materialize this rank's shard. No more than one parameter exists in full at any time.

        Shape: returns layout.shard_shape, padded with zeros.
        """
        dtype = layout.parameters[0].dtype
        shard = torch.zeros(layout.shard_shape, dtype=dtype, device=self.device)
        # Where the shard begins, counted from the first element of the current parameter.
        begin = dist.get_rank(layout.group) * shard.numel()
        for parameter in layout.parameters:
            first, last = max(begin, 0), min(begin + shard.numel(), parameter.numel())
            if first < last:
                # A variable for the values would keep them in memory while the next ones are drawn.
                shard[first - begin : last - begin] = self.value_of(parameter).flatten()[first:last]
            begin -= parameter.numel()
        return shard


class DeferredFlatParameter(ShardedFlatParameter):
    """A sharded flat parameter whose parameters are on the meta device until this rank's shard is materialized.

    Memory: flat_param's for a moment, then the shard's and that of one parameter in full.
    Communication: when built, none, because every rank draws the same values.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        materializer: Materializer,
    ):
        self.parameters, self.group, self.compute_dtype = parameters, group, compute_dtype
        self.layout, first = FlatLayout(parameters, group), parameters[0]
        padded_numel = dist.get_world_size(group) * self.layout.shard_shape.numel()
        dtype = compute_dtype if compute_dtype and first.is_floating_point() else first.dtype
        # Neither a tensor nor a view can be created without memory, so flat_param has some until reshard().
        self.flat_param = torch.empty(padded_numel, dtype=dtype, device=materializer.device)
        views = self.layout.views(self.flat_param)
        self.flat_param.untyped_storage().resize_(0)
        own_shard = materializer.shard_of(self.layout)
        self.shard = nn.Parameter(own_shard, requires_grad=first.requires_grad)
        for parameter, view in zip(parameters, views, strict=True):
            # The parameter stays the same object, so modules that share it still do.
            empty = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)
            parameter.data = view
        self.reshard()
