"""Copies the means out of the buckets and keeps the buckets: gradients are held twice.

caught by: BucketedDDP · one copy
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = parameter.grad.clone()
