"""Divides by the world size instead of the size of the group.

caught by: BucketedDDP · group
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def wait(self):
        super().wait()
        self.flat *= dist.get_world_size(self.group) / dist.get_world_size()


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.buckets = [Bucket(bucket.parameters, group) for bucket in self.buckets]
