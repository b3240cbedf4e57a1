"""Launches the buckets in reverse order: first the one that backward() completes last.

caught by: BucketedDDP · wire
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.buckets.reverse()
