"""Rejects a second gradient only if its bucket is launched, although .grad is a slice of the bucket before that, too.

caught by: GradientSync · second gradient
"""

from solutions import overlapped_ddp as right


class _Queue(right.LaunchQueue):
    def add(self, bucket_index, index):
        self.missing[bucket_index].add(index)  # so that a second gradient raises no KeyError
        super().add(bucket_index, index)


class GradientSync(right.GradientSync):
    def __init__(self, buckets):
        super().__init__(buckets)
        self.queue = _Queue(buckets)

    def on_gradient(self, bucket_index, index):
        if self.queue.launched > bucket_index:
            raise RuntimeError("call finish_gradient_sync() after each backward(), or use no_sync()")
        self.pending = True
        if self.enabled:
            self.queue.add(bucket_index, index)
