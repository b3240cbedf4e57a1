"""Keeps a copy of each step's gradients in a closure, where no attribute shows it.

caught by: BucketedDDP · one copy
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        kept = [bucket.flat.clone() for bucket in self.buckets]
        self.last_gradients = lambda: kept
