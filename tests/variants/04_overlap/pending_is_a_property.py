"""Keeps the set of gradients that are not averaged, computes `pending` from it, and writes no_sync() as a class."""

from shared import guards
from solutions import overlapped_ddp as right


class _Silent:
    def __init__(self, sync):
        self.sync = sync

    def __enter__(self):
        self.before, self.sync.enabled = self.sync.enabled, False

    def __exit__(self, *_):
        self.sync.enabled = self.before


class GradientSync(right.GradientSync):
    def __init__(self, buckets):
        self.queue, self.enabled, self.not_averaged, self.done = right.LaunchQueue(buckets), True, set(), False
        right.watch_gradients(buckets, self.on_gradient)

    @property
    def pending(self):
        return bool(self.not_averaged)

    def on_gradient(self, bucket_index, index):
        self.not_averaged.add((bucket_index, index))
        if self.enabled:
            right.at_end_of_backward(self.synchronize)
            self.queue.add(bucket_index, index)

    @guards.synchronizes
    def synchronize(self):
        self.queue.finish()
        self.not_averaged.clear()
        self.done = True

    def no_sync(self):
        return _Silent(self)


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None, *, compressor=None):
        super().__init__(module, bucket_cap_mb, group, compressor=compressor)
        self.sync = GradientSync(self.buckets)
