"""Reduces gradients in float16: values outside its range and precision are lost.

caught by: BucketedDDP · values
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            small = bucket.flat.half()
            dist.all_reduce(small, group=bucket.group)
            bucket.flat.copy_(small)
