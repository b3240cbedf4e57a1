"""Packs buckets but all-reduces their gradients one by one.

caught by: BucketedDDP · wire
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for index, piece in enumerate(bucket.slices):
                bucket.pack(index)
                dist.all_reduce(piece, group=bucket.group)
