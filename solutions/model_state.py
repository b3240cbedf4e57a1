# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""State of a sharded model: full state dicts, and views for torch.distributed.checkpoint."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from solutions.collectives import gather_shards
from solutions.flat import FlatLayout
from solutions.units import ShardedFlatParameter


def drop_full_parameters(wrapper: nn.Module, state: dict, prefix: str, _metadata) -> None:
    """Keep a wrapper's state_dict() about its shards: the module's parameters have no memory between steps."""
    for name, _ in wrapper.module.named_parameters(remove_duplicate=False):
        del state[f"{prefix}module.{name}"]


def expect_no_full_parameters(wrapper: nn.Module, keys) -> None:
    """Let a wrapper's load_state_dict() do without the module's parameters."""
    full = {name for name, _ in wrapper.module.named_parameters("module", remove_duplicate=False)}
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in full]


@torch.no_grad()
def gather_full_state(module: nn.Module, flat_parameters: Iterable[ShardedFlatParameter]) -> dict[str, torch.Tensor]:
    """Gather what module.state_dict() would return if module were not sharded. All ranks must call this.

    Communication: one all-gather per flat parameter.
    """
    full = {}
    for flat_parameter in flat_parameters:
        flat = gather_shards(flat_parameter.shard, flat_parameter.layout.group)
        full |= zip(flat_parameter.layout.parameters, flat_parameter.layout.views(flat), strict=True)
    state = module.state_dict(keep_vars=True)
    return {name: full.get(value, value).detach().clone() for name, value in state.items()}


@torch.no_grad()
def load_full_state(
    module: nn.Module,
    flat_parameters: Iterable[ShardedFlatParameter],
    state_dict: dict[str, torch.Tensor],
) -> None:
    """Keep this rank's shard of a full state.

    Raises:
        ValueError: for the state of another module.
    """
    own = module.state_dict(keep_vars=True)
    shapes = {name: value.shape for name, value in own.items()}
    if shapes != {name: value.shape for name, value in state_dict.items()}:
        different = sorted(set(shapes) ^ set(state_dict)) or "the shapes"
        raise ValueError(f"this is the state of another module: {different} differ")
    given = {value: state_dict[name] for name, value in own.items()}
    for flat_parameter in flat_parameters:
        layout, shard = flat_parameter.layout, flat_parameter.shard
        flat = layout.new_flat(shard.dtype)
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(given.pop(parameter))
        shard.copy_(layout.shard_of(flat))
    for buffer, value in given.items():
        buffer.copy_(value)


def as_dtensor(layout: FlatLayout, value: torch.Tensor) -> DTensor:
    """Describe where a shard belongs in the flat tensor of all ranks. The result is a view, without the padding."""
    left = layout.numel - dist.get_rank(layout.group) * value.numel()
    mesh = DeviceMesh.from_group(layout.group or dist.group.WORLD, value.device.type)
    shape = {"shape": torch.Size([layout.numel]), "stride": (1,)}
    return DTensor.from_local(value.detach()[: max(0, left)], mesh, [Shard(0)], run_check=False, **shape)


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state before the first step, so that there is something to load into."""
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
    """View this rank's shards, and the optimizer's state of them, as torch.distributed.checkpoint saves and loads them.

    An optimizer that has not stepped has no state to load into: see begin_state().
    """
    state = {f"module.{name}": buffer for name, buffer in module.named_buffers()}
    for index, flat_parameter in enumerate(flat_parameters):
        shard, layout = flat_parameter.shard, flat_parameter.layout
        for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
            is_sharded = torch.is_tensor(value) and value.shape == shard.shape
            state[f"{index}.{name}"] = as_dtensor(layout, value) if is_sharded else value
    return state
