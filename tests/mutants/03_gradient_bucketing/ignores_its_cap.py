"""Ignores `bucket_cap_mb` and always uses 25 MB.

caught by: BucketedDDP · wire
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, 25.0, group)
