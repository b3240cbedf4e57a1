# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""Reducing gradients: packed as soon as they are complete, reduce-scattered when all ranks are at the same point."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from solutions.overlapped_ddp import watch_gradients
from solutions.units import describe
from solutions.zero2 import ShardedBucket


class ShardOfGradient(torch.Tensor):
    """One rank's shard of a gradient. What needs the whole gradient communicates, or raises a RuntimeError.

    It is `incomplete` from the end of backward() until finish_gradient_sync(), which adds the rest. Then, only
    zero_grad() may use it.
    """

    group: dist.ProcessGroup | None = None
    incomplete = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name, is_attribute = function.__name__, type(function).__name__ == "method-wrapper"
        if name.endswith("norm"):  # torch.nn.utils.clip_grad_norm_ calls _foreach_norm or linalg_vector_norm
            raise RuntimeError(
                "this rank has only its shard of the gradient, so its norm is not the model's: call clip_grad_norm_() "
                "of the ZeRO3 model (or use gradient.as_subclass(torch.Tensor), if you want the shard's norm)"
            )
        if not is_attribute and name not in ("detach_", "requires_grad_", "as_subclass"):
            for gradient in [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]:
                if name in ("zero_", "_foreach_zero_"):
                    gradient.incomplete = False
                elif gradient.incomplete:
                    raise RuntimeError(
                        f"{name}() needs a gradient that is not complete: call finish_gradient_sync() after backward()"
                    )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            if function is torch._amp_foreach_non_finite_check_and_unscale_:  # GradScaler: all ranks skip, or none
                dist.all_reduce(args[1], op=dist.ReduceOp.MAX, group=args[0][0].group)
        return result


class GradientBucket(ShardedBucket):
    """A ShardedBucket whose shard.grad is a ShardOfGradient.

    `marker` is shard.grad at the end of backward, if the bucket still has something to add to it.
    """

    marker: ShardOfGradient | None = None

    def mark(self) -> None:
        """Begin shard.grad, so that zero_grad() leaves a trace."""
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
        if marker is not None and (shard.grad is not marker or not marker.incomplete):
            self.drop()
            return
        if marker is not None:
            marker.incomplete = False
        super().wait()
        if not isinstance(shard.grad, ShardOfGradient):
            shard.grad = shard.grad.as_subclass(ShardOfGradient)
        shard.grad.group = self.layout.group

    def drop(self) -> None:
        """Drop what has not been added to shard.grad."""
        if self.in_flight is not None:
            self.in_flight.wait()
        self.flat = self.views = self.in_flight = self.marker = None


class GradientReducer:
    """Packs gradients while backward computes them, and reduce-scatters buckets when reduce() is called.

    The hook of a gradient launches nothing, because a parameter may be unused on some ranks, and every rank must launch
    the same collectives in the same order.

    `missing[bucket]` holds the indices of the gradients that are not packed yet. `launched` lists the buckets launched
    in this backward, in order.
    """

    def __init__(self, buckets: Sequence[ShardedBucket]):
        self.buckets = buckets
        self._begin()
        watch_gradients(buckets, self.on_gradient)

    def _begin(self) -> None:
        self.missing = {bucket: set(range(len(bucket.parameters))) for bucket in self.buckets}
        self.launched: list[ShardedBucket] = []

    def drop(self) -> None:
        """Drop the gradients of a backward() that has not been finished."""
        for bucket in self.buckets:
            bucket.drop()
        self._begin()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        watch_gradients(self.buckets, self.on_gradient)  # deepcopy does not copy hooks

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that backward() has just completed.

        Raises:
            RuntimeError: if this parameter's gradient is already packed.
        """
        bucket = self.buckets[bucket_index]
        if index not in self.missing[bucket]:
            raise RuntimeError(
                f"got a second gradient for {describe(bucket.parameters[index])}: call finish_gradient_sync() after "
                "each backward(). If there was only one backward(), this layer is probably called twice under "
                "reentrant checkpointing: use checkpoint(..., use_reentrant=False)"
            )
        if bucket.parameters[index].grad.layout is not torch.strided:
            raise RuntimeError(
                f"{describe(bucket.parameters[index])} has a sparse gradient, which cannot be sharded: "
                "use nn.Embedding(..., sparse=False)"
            )
        self.missing[bucket].remove(index)
        bucket.pack(index)

    def reduce(self, buckets: Iterable[ShardedBucket]) -> None:
        """Launch the reduce-scatters of buckets that are not launched yet. Missing gradients count as zeros.

        Communication: one reduce-scatter per bucket launched.
        """
        for bucket in buckets:
            if bucket in self.launched:
                continue
            for index in sorted(self.missing[bucket]):
                bucket.pack(index)
            self.missing[bucket] = set()
            bucket.previous = self.launched[-1] if self.launched else None
            bucket.launch()
            self.launched.append(bucket)

    def finish(self) -> None:
        """Reduce the remaining buckets, wait for all of them, and get ready for the next backward."""
        self.reduce(self.buckets)
        for bucket in self.buckets:
            bucket.wait()
        self._begin()
