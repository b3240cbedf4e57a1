"""Fills the first bucket up to `bucket_cap_mb` instead of the smaller first cap.

caught by: OverlappedDDP · wire
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        assigned = right.assign_buckets(module.parameters(), bucket_cap_mb, bucket_cap_mb)
        self.buckets = [right.Bucket(parameters, group) for parameters in assigned]
        self.sync = right.GradientSync(self.buckets)
