"""Polls in the hook until the bucket is complete, which is a wait in disguise.

caught by: OverlappedDDP · no waiting in backward
"""

import time

from solutions import overlapped_ddp as right


class _Bucket(right.Bucket):
    def launch(self):
        super().launch()
        while not self.handle.is_completed():
            time.sleep(1e-4)


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        for bucket in self.buckets:
            bucket.__class__ = _Bucket
