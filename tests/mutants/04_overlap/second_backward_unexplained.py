"""Rejects a second backward() with a bare assertion instead of an explanation.

caught by: OverlappedDDP · rejections
"""

from solutions import overlapped_ddp as right


class _Sync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        assert index in self.queue.missing[bucket_index]
        super().on_gradient(bucket_index, index)


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.sync = _Sync(self.buckets)
