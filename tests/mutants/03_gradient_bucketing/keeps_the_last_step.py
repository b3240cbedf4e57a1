"""Uses the last step's mean for a gradient that is None.

caught by: BucketedDDP · unused on one rank
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def finish_gradient_sync(self):
        for bucket in self.buckets:
            for parameter, piece in zip(bucket.parameters, bucket.slices, strict=True):
                if parameter.grad is None:
                    parameter.grad = piece * dist.get_world_size(bucket.group)
        super().finish_gradient_sync()
