"""Blocks in the hook until the bucket is complete, as async_op=False does.

caught by: OverlappedDDP · overlap
"""

import torch.distributed as dist

from solutions import overlapped_ddp as right


class _Bucket(right.Bucket):
    def launch(self):
        dist.all_reduce(self.flat, group=self.group)

    def wait(self):
        pass


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        for bucket in self.buckets:
            bucket.__class__ = _Bucket
