# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""State dicts of a sharded model: full ones, and sharded ones for torch.distributed.checkpoint."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shared.sharded.states import (
    OwnShards,
    expect_no_extra_state,
    extra_state_in,
    load_extra_state,
    without_extra_state,
)
from solutions.collectives import gather_shards
from solutions.flat import FlatLayout
from solutions.units import ShardedFlatParameter


def drop_full_parameters(wrapper: nn.Module, state: dict, prefix: str, _metadata) -> None:
    """Leave the module's parameters out of a wrapper's state_dict(): between steps, only its shards have memory."""
    for name, _ in wrapper.module.named_parameters(remove_duplicate=False):
        del state[f"{prefix}module.{name}"]


def expect_no_full_parameters(wrapper: nn.Module, keys) -> None:
    """Let a wrapper's load_state_dict() accept a state without the module's parameters."""
    full = {name for name, _ in wrapper.module.named_parameters("module", remove_duplicate=False)}
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in full]


class ShardedModule(OwnShards, nn.Module):
    """The base of ZeRO3, which knows all about its states: those of the rank's shards, full ones, and sharded ones.

    A subclass has `module`, `group`, `flat_parameters`, their `shards`, and _reshard_all().
    """

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(drop_full_parameters)
        self.register_load_state_dict_post_hook(expect_no_full_parameters)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Name this rank's shards, for an optimizer."""
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Gather what module.state_dict() would return without sharding. See gather_full_state()."""
        with without_extra_state(self.module) as extra:
            return gather_full_state(self.module, self.flat_parameters) | extra

    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Keep this rank's shard of a full state. See load_full_state()."""
        extra = extra_state_in(state_dict, self.module)
        tensors = {name: value for name, value in state_dict.items() if name not in extra}
        self._reshard_all()  # the root may still have the old values
        with without_extra_state(self.module):
            load_full_state(self.module, self.flat_parameters, tensors)
        load_extra_state(self.module, extra)

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> dict:
        """View this rank's shards for torch.distributed.checkpoint. See sharded_state()."""
        expect_no_extra_state(self.module)
        return sharded_state(self.module, self.flat_parameters, optimizer)


def values_in(module: nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Return the value that a full state has for each parameter and buffer of module.

    Raises:
        ValueError: if the state belongs to another module.
    """
    own = module.state_dict(keep_vars=True)
    own_shapes = {name: value.shape for name, value in own.items()}
    given_shapes = {name: value.shape for name, value in state_dict.items()}
    if own_shapes != given_shapes:
        different = sorted({name for name, _ in own_shapes.items() ^ given_shapes.items()})
        raise ValueError(
            f"this state belongs to another module: {different} are not in both, or do not have the same shape in both"
        )
    return {value: state_dict[name] for name, value in own.items()}


@torch.no_grad()
def gather_full_state(module: nn.Module, flat_parameters: Iterable[ShardedFlatParameter]) -> dict[str, torch.Tensor]:
    """Gather what module.state_dict() would return if module were not sharded. All ranks must call this.

    Communication: one all-gather per flat parameter.
    """
    full_value = {}
    for flat_parameter in flat_parameters:
        layout = flat_parameter.layout
        flat = gather_shards(flat_parameter.shard, layout.group)
        full_value |= zip(layout.parameters, layout.views(flat), strict=True)
    state = module.state_dict(keep_vars=True)
    return {name: full_value.get(value, value).detach().clone() for name, value in state.items()}


@torch.no_grad()
def load_full_state(
    module: nn.Module,
    flat_parameters: Iterable[ShardedFlatParameter],
    state_dict: dict[str, torch.Tensor],
) -> None:
    """Keep this rank's shards of a full state, and load the buffers.

    Raises:
        ValueError: if the state belongs to another module.
    """
    new_value = values_in(module, state_dict)
    for flat_parameter in flat_parameters:
        layout, shard = flat_parameter.layout, flat_parameter.shard
        flat = layout.new_flat(shard.dtype)
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(new_value.pop(parameter))
        shard.copy_(layout.shard_of(flat))
    for buffer, value in new_value.items():
        buffer.copy_(value)


def as_dtensor(layout: FlatLayout, value: torch.Tensor) -> DTensor:
    """Describe where a shard belongs in the flat tensor of all ranks. The result is a view, without the padding."""
    begin = dist.get_rank(layout.group) * value.numel()
    unpadded = value.detach()[: max(0, layout.numel - begin)]
    mesh = DeviceMesh.from_group(layout.group or dist.group.WORLD, value.device.type)
    shape = {"shape": torch.Size([layout.numel]), "stride": (1,)}
    return DTensor.from_local(unpadded, mesh, [Shard(0)], run_check=False, **shape)


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state before its first step, so that a checkpoint can be loaded into it.

    It steps once with gradients of zero and a learning rate of 0, which changes no parameter.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def sharded_state(
    module: nn.Module,
    flat_parameters: Iterable[ShardedFlatParameter],
    optimizer: torch.optim.Optimizer,
) -> dict:
    """View this rank's shards, and the optimizer's state for them, in a dict for torch.distributed.checkpoint.

    An optimizer that has not stepped has no state to load into: call begin_state() first.
    """
    state = {f"module.{name}": buffer for name, buffer in module.named_buffers()}
    for index, flat_parameter in enumerate(flat_parameters):
        shard, layout = flat_parameter.shard, flat_parameter.layout
        for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
            is_sharded = torch.is_tensor(value) and value.shape == shard.shape
            state[f"{index}.{name}"] = as_dtensor(layout, value) if is_sharded else value
    return state
