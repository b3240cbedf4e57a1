"""Broadcasts the parameters at construction but not the buffers.

caught by: BucketedDDP · same start
"""

import torch.distributed as dist
from torch import nn

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        nn.Module.__init__(self)
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), group=group, group_src=0)
        assigned = right.assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [right.Bucket(parameters, group) for parameters in assigned]
