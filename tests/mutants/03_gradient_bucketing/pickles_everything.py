"""Gathers every rank's gradients as pickled objects and averages them locally.

caught by: BucketedDDP · wire
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            gathered = [None] * dist.get_world_size(bucket.group)
            dist.all_gather_object(gathered, bucket.flat, group=bucket.group)
            bucket.flat.copy_(sum(gathered))
