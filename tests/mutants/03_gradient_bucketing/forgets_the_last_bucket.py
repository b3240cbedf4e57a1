"""Never reduces the last bucket.

caught by: BucketedDDP · values
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.buckets = self.buckets[: max(1, len(self.buckets) - 1)]
