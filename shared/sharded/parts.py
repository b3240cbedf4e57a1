"""Parameters that are only a part of a model: which of torch's tools would do something wrong with them.

An optimizer, GradScaler and clip_grad_norm_() see parameters, but not what other ranks have. So a parameter carries a
Part, which they are made to look at.
"""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shared.guards.optimizers import reject_joint_updates, reject_whole_tensor_updates


@dataclasses.dataclass(frozen=True)
class Part:
    """What a parameter is a part of. An advice is empty where torch's own tool is right."""

    instead_of_step: str = ""  # what to do instead of giving the parameter to an optimizer
    instead_of_clipping: str = ""  # what to do instead of calling clip_grad_norm_()
    instead_of_scaling: str = ""  # what to do instead of using a GradScaler
    is_split: bool = False  # whether other ranks have other elements of the same parameter
    ranks: frozenset[int] = frozenset()  # those that have other elements, or other parameters in this place
    holds: str = ""  # what an optimizer's state for it belongs to


def mark(parameters: Iterable[nn.Parameter], **changes) -> None:
    """Tell torch's tools what these parameters are a part of, in addition to what they know already."""
    _guard_torch()
    for parameter in parameters:
        part = dataclasses.replace(_part_of(parameter), **changes)
        parameter.part = part  # pyright: ignore[reportAttributeAccessIssue] (an attribute of its own)


def mark_local(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, clip_with: str, **changes) -> None:
    """Mark parameters of a model of which other ranks have other parameters, or other elements."""
    if dist.get_world_size(group) > 1:
        scaling = "train in bfloat16, which needs no GradScaler"
        ranks = frozenset(dist.get_process_group_ranks(group or dist.group.WORLD))
        own = f"rank {dist.get_rank(group)} of {len(ranks)}"
        for parameter in parameters:
            held = _part_of(parameter).holds
            holds = held if own in held else f"{held}, {own}".removeprefix(", ")
            clipping = {"instead_of_clipping": clip_with, "instead_of_scaling": scaling}
            mark([parameter], ranks=ranks, holds=holds, **clipping, **changes)


def _part_of(parameter: nn.Parameter) -> Part:
    return getattr(parameter, "part", Part())


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@functools.cache
def _guard_torch() -> None:
    """Look at Parts in torch's tools. Optimizers have hooks for this. The others have none, so they are replaced."""
    checked = weakref.WeakSet()  # the optimizers that update each element by itself, and have a state of their own
    watched = weakref.WeakSet()  # those that are checked again after load_state_dict()

    def before_step(optimizer: torch.optim.Optimizer, *_args) -> None:
        parts = [_part_of(parameter) for parameter in _parameters_of(optimizer)]
        if advice := next((part.instead_of_step for part in parts if part.instead_of_step), ""):
            name = type(optimizer).__name__
            raise RuntimeError(f"this {name} has parameters of a model that is sharded now: {advice}")
        if optimizer not in checked and any(part.ranks or part.is_split for part in parts):
            if any(part.ranks for part in parts):
                _try(reject_joint_updates, optimizer)
            if any(part.is_split for part in parts):
                _try(reject_whole_tensor_updates, optimizer)
            _expect_own_state(optimizer)
            checked.add(optimizer)
            if optimizer not in watched:
                watched.add(optimizer)
                optimizer.register_load_state_dict_post_hook(checked.discard)

    def before_clipping(parameters: nn.Parameter | Iterable[nn.Parameter], *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for part in map(_part_of, parameters):
            if part.instead_of_clipping:
                raise RuntimeError(
                    "torch's clip_grad_norm_() would use the norm of what this rank has, not that of the whole model: "
                    + part.instead_of_clipping
                )
        return clip(parameters, *args, **kwargs)

    def before_unscaling(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        for part in map(_part_of, _parameters_of(optimizer)):
            if scaler.is_enabled() and part.instead_of_scaling:
                raise RuntimeError(
                    "a GradScaler looks for overflow only in what its own rank has, so some ranks would skip a step "
                    f"that others take: {part.instead_of_scaling}"
                )
        unscale(scaler, optimizer)

    register_optimizer_step_pre_hook(before_step)
    clip, unscale = clip_grad._clip_grads_with_norm_, torch.amp.GradScaler.unscale_
    clip_grad._clip_grads_with_norm_ = functools.wraps(clip)(before_clipping)  # clip_grad_norm_() calls this one
    checked_unscale = functools.wraps(unscale)(before_unscaling)  # step() calls this one, too
    torch.amp.GradScaler.unscale_ = checked_unscale  # pyright: ignore[reportAttributeAccessIssue] (a patch)


def _expect_own_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise a RuntimeError if an optimizer has loaded a state of other parts, which may have the same shapes.

    Its param groups record which parts they hold, and so do its state dicts.
    """
    for group in optimizer.param_groups:
        own = [_part_of(parameter).holds for parameter in group["params"]]
        for loaded, mine in zip(group.get("parts", own), own, strict=False):
            if loaded != mine:
                raise RuntimeError(
                    f"this {type(optimizer).__name__} has loaded the state of {loaded or 'a whole parameter'}, for "
                    f"{mine or 'a whole parameter'}: let each rank save and load its own state, for a model that is "
                    "divided in the same way"
                )
        group["parts"] = own


def _try(reject: Callable[[type, dict], None], optimizer: torch.optim.Optimizer) -> None:
    """Let a function judge an optimizer's class and settings, unless that cannot be built in the usual way."""
    signature = inspect.signature(type(optimizer))
    how_to_run = {"foreach", "fused", "capturable", "differentiable"}  # these change no result
    settings = {name: value for name, value in optimizer.defaults.items() if name in signature.parameters}
    settings = {name: value for name, value in settings.items() if name not in how_to_run}
    try:
        signature.bind([], **settings)
    except TypeError:
        return
    reject(type(optimizer), settings)
