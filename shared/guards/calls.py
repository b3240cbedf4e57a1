"""What may not be called around a step: what takes this rank's gradients for the mean, or makes the mean wrong."""

import functools
import gc
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shared.guards.tensors import name_of

guards = weakref.WeakSet()  # the Guard of every wrapper that is alive


def second_gradient(parameter: nn.Parameter) -> str:
    """Say why a parameter got two gradients in one backward(), and what to do."""
    return (
        f"got a second gradient for {name_of(parameter)} in one backward(): checkpoint(..., use_reentrant=True) has "
        "run another backward in each call of a shared layer, so pass use_reentrant=False. If an interrupt has ended "
        "the last backward() while it waited for other ranks, run this one again"
    )


def stale_gradient(parameter: nn.Parameter) -> str:
    """Say that backward() has added a gradient to what a reduce-scatter has overwritten, and what to do."""
    return (
        f"an earlier backward() has reduced the gradient of {name_of(parameter)}, and this one has added to it. "
        "To accumulate gradients, run all but the last backward() in the optimizer's no_sync(). Call its zero_grad() "
        "after each step(), and clip_grad_norm_() after the last backward()"
    )


def reject_altered(buckets: Iterable) -> None:
    """Raise a RuntimeError if gradients were dropped or changed after backward() had reduced them."""
    for bucket in buckets:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not view or bucket.flat._version != bucket.reduced_version:
                what = "dropped" if parameter.grad is None else "changed"
                raise RuntimeError(
                    f"the gradient of {name_of(parameter)} or another one in its bucket was {what} after backward() "
                    "had reduced it: to skip a batch, call the optimizer's zero_grad(), on all ranks. To scale "
                    "gradients, scale the loss, or call the optimizer's clip_grad_norm_(max_norm)"
                )


def reject_grad_scaler(optimizer) -> bool:
    """Raise if torch's GradScaler asks a sharded optimizer for `_step_supports_amp_scaling`, as its step() does."""
    raise RuntimeError(
        "torch's GradScaler looks for overflow only in the gradients of its own rank, so with "
        f"{type(optimizer).__name__} some ranks would skip a step, and the others wait for them: train in bfloat16, "
        "which needs no GradScaler"
    )


@functools.cache
def guard_torch() -> None:
    """Let torch's optimizers, gradient clipping and GradScaler ask the guards first. The first guard calls this.

    They see a parameter's .grad, but not whether it is the mean yet. For optimizers, torch has hooks. For clipping and
    for GradScaler, it has none, so three of its functions are replaced by ones that check their arguments.
    """
    register_optimizer_step_pre_hook(_before_step)
    unscale = torch.amp.GradScaler.unscale_

    @functools.wraps(unscale)
    def unscale_checked(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        _before_step(optimizer, call="unscale_()")
        return unscale(scaler, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_checked  # pyright: ignore[reportAttributeAccessIssue] (a patch)
    # Two names of one function. clip_grad_norm_() calls the first, which shared.sharded may have replaced already.
    clip_grad._clip_grads_with_norm_ = _checked(clip_grad._clip_grads_with_norm_)
    nn.utils.clip_grads_with_norm_ = _checked(nn.utils.clip_grads_with_norm_)
    clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = _checked(clip_grad.clip_grad_value_)


def _before_step(optimizer: torch.optim.Optimizer, *_args, call: str = "step()") -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not hasattr(optimizer, "pieces") and _first_sharded(parameters) is not None:
        gc.collect()  # perhaps the wrapper is gone, and only a cycle keeps it alive
        if (parameter := _first_sharded(parameters)) is not None:
            raise RuntimeError(
                f"{call} of this {type(optimizer).__name__} would update {name_of(parameter)} and others, whose "
                "gradients are sharded: call step() of ZeRO1 or ZeRO2, which has an optimizer of its own"
            )
    for guard in [guard for guard in guards if guard.pending]:  # usually none
        if getattr(optimizer, "guard", None) is guard:
            continue  # it finishes in its own step()
        if (parameter := guard.first_pending(parameters)) is not None:
            raise RuntimeError(
                f"{call} would use only this rank's gradient of {name_of(parameter)} and others: "
                + (
                    f"call the step() of the optimizer that averages them instead of this {call}"
                    if guard.syncs_at_step
                    else f"call finish_gradient_sync() between backward() and {call}, outside no_sync()"
                )
            )


def _first_sharded(parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """Return the first of the parameters whose gradients are sharded by ZeRO1 or ZeRO2."""
    found = (next(guard.own(parameters), None) for guard in guards if guard.clip_with)
    return next((parameter for parameter in found if parameter is not None), None)


def _checked(clip):
    @functools.wraps(clip)
    def clip_checked(parameters: nn.Parameter | Iterable[nn.Parameter], *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _before_clipping(parameters)
        return clip(parameters, *args, **kwargs)

    return clip_checked


def _before_clipping(parameters: Iterable[nn.Parameter]) -> None:
    for guard in list(guards):
        parameter = next(guard.own(parameters), None) if guard.clip_with else guard.first_pending(parameters)
        if parameter is not None:
            raise RuntimeError(
                f"torch's gradient clipping would use only the gradients that this rank holds, of {name_of(parameter)} "
                f"and others: call {guard.clip_with or 'finish_gradient_sync() before it'}"
            )
