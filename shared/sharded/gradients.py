"""Gradients of a sharded model: each rank holds a shard, which is complete only after finish_gradient_sync()."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared.guards.alarms import naming_the_wait
from shared.sharded.parameters import SAME_CALLS, describe

KEEPS_NOTHING = ("zero_", "_foreach_zero_")  # zero_grad(set_to_none=False) calls one of these
NEEDS_NO_VALUES = ("detach_", "requires_grad_", "as_subclass", "untyped_storage", "data_ptr", "element_size")


class ShardOfGradient(torch.Tensor):
    """One rank's shard of a gradient. What needs the whole gradient communicates, or raises a RuntimeError.

    It is `incomplete` from the end of backward() until finish_gradient_sync(), which adds the rest. Then, only
    zero_grad() may use it.
    """

    group: dist.ProcessGroup | None = None
    incomplete = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        if name.endswith("norm"):  # torch.nn.utils.clip_grad_norm_ calls _foreach_norm or linalg_vector_norm
            raise RuntimeError(
                "this rank has only its shard of the gradient, so its norm is not the model's: call clip_grad_norm_() "
                "of the ZeRO3 model (or use gradient.as_subclass(torch.Tensor), if you want the shard's norm)"
            )
        is_attribute = type(function).__name__ == "method-wrapper"  # such as Tensor.shape.__get__
        if not is_attribute and name not in NEEDS_NO_VALUES:
            for gradient in [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]:
                gradient._use_in(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            if function is torch._amp_foreach_non_finite_check_and_unscale_:  # GradScaler: all ranks skip, or none
                dist.all_reduce(args[1], op=dist.ReduceOp.MAX, group=args[0][0].group)
        return result

    def _use_in(self, name: str) -> None:
        if name in KEEPS_NOTHING:
            self.incomplete = False
        elif self.incomplete:
            raise RuntimeError(
                f"{name}() needs a gradient that is not complete: call finish_gradient_sync() after backward()"
            )


class DroppedByZeroGrad:
    """Adds to a ShardedBucket: if zero_grad() comes between backward() and wait(), the bucket's gradients are dropped.

    Otherwise, a batch that is skipped would be added to the next one. shard.grad is a ShardOfGradient. `marker` is
    shard.grad at the end of backward, if the bucket still has something to add to it.
    """

    marker: ShardOfGradient | None = None
    parameters: list[torch.nn.Parameter]  # This attribute and the next ones are the bucket's.
    flat: Tensor | None
    flat_parameter: Any
    layout: Any
    in_flight: Any

    def pack(self, index: int) -> None:
        """Pack a gradient. None leaves what is in the bucket: zeros, or a gradient that is packed already."""
        gradient = self.parameters[index].grad
        if gradient is None and self.flat is not None:
            return
        if gradient is not None and gradient.layout is not torch.strided:
            raise RuntimeError(
                f"{describe(self.parameters[index])} has a sparse gradient, which cannot be sharded: "
                "use nn.Embedding(..., sparse=False)"
            )
        with torch._C.DisableTorchFunctionSubclass():  # The parameter's memory may be freed.
            super().pack(index)  # pyright: ignore[reportAttributeAccessIssue] (the bucket's)

    def mark(self) -> None:
        """Begin shard.grad at the end of backward, so that zero_grad() leaves a trace."""
        shard = self.flat_parameter.shard
        if self.flat is None:
            return
        if not isinstance(shard.grad, ShardOfGradient):
            gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
            shard.grad = gradient.detach().as_subclass(ShardOfGradient)
        self.marker, shard.grad.incomplete = shard.grad, True

    def wait(self) -> None:
        """Add this rank's shard of the mean gradient to shard.grad, unless zero_grad() was called since backward()."""
        if self.in_flight is None:
            return
        marker, self.marker, shard = self.marker, None, self.flat_parameter.shard
        if marker is not None:
            if shard.grad is not marker or not marker.incomplete:
                self.drop()
                return
            marker.incomplete = False
        with naming_the_wait(self.layout.group, self._describe, SAME_CALLS):
            super().wait()  # pyright: ignore[reportAttributeAccessIssue] (the bucket's)
        if not isinstance(shard.grad, ShardOfGradient):
            shard.grad = shard.grad.as_subclass(ShardOfGradient)
        shard.grad.group = self.layout.group

    def _describe(self) -> str:
        return f"the mean gradient of {describe(self.parameters[0])}"

    def drop(self) -> None:
        """Drop what has not been added to shard.grad."""
        if self.in_flight is not None:
            self.in_flight.wait()
        self.flat = self.views = self.in_flight = self.marker = None


def second_gradient(parameter: nn.Parameter) -> str:
    """Say what to do if backward() computes a second gradient of a parameter."""
    return (
        f"got a second gradient for {describe(parameter)}: call finish_gradient_sync() after each backward(). If there "
        "was only one backward(), this layer is probably called twice under reentrant checkpointing: use "
        "checkpoint(..., use_reentrant=False)"
    )


def plain_gradients(shards: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients that shards have, as plain tensors in the same memory."""
    return [shard.grad.as_subclass(torch.Tensor) for shard in shards if shard.grad is not None]
