"""Includes frozen parameters in the buckets.

caught by: BucketedDDP · wire
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        trainable = [parameter.requires_grad for parameter in module.parameters()]
        module.requires_grad_(True)
        super().__init__(module, bucket_cap_mb, group)
        for parameter, takes_gradient in zip(module.parameters(), trainable, strict=True):
            parameter.requires_grad_(takes_gradient)
