"""Divides by the number of buckets as well.

caught by: BucketedDDP · plain model
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for bucket in self.buckets:
            bucket.flat /= len(self.buckets)
