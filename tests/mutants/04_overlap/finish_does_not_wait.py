"""Returns without waiting for the buckets: the optimizer may step with incomplete gradients.

caught by: OverlappedDDP · no waiting in backward
"""

from solutions import overlapped_ddp as right


class _Bucket(right.Bucket):
    def wait(self):
        pass


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        for bucket in self.buckets:
            bucket.__class__ = _Bucket
