"""Packs every gradient but launches no bucket: each rank keeps its own gradients, divided by world_size.

caught by: OverlappedDDP · plain model
"""

from solutions import overlapped_ddp as right


class _Bucket(right.Bucket):
    def launch(self):
        pass

    def wait(self):
        pass


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        for bucket in self.buckets:
            bucket.__class__ = _Bucket
