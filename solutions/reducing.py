# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""Reducing gradients: packed as soon as they are complete, reduce-scattered when all ranks are at the same point."""

from collections.abc import Iterable, Sequence

from shared.sharded.gradients import DroppedByZeroGrad, second_gradient
from solutions.overlapped_ddp import watch_gradients
from solutions.zero2 import ShardedBucket


class UnitBucket(DroppedByZeroGrad, ShardedBucket):
    """A ShardedBucket whose gradients zero_grad() drops, too, even before finish_gradient_sync() has added them."""


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

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that backward() has just completed.

        Raises:
            RuntimeError: if this parameter's gradient is already packed.
        """
        bucket = self.buckets[bucket_index]
        if index not in self.missing[bucket]:
            raise RuntimeError(second_gradient(bucket.parameters[index]))
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
