"""Broadcasts one parameter at a time.

caught by: ShardedFlatParameter · plain parameters
"""

import torch.distributed as dist

from solutions import units as right
from solutions.flat import FlatParameter


class ShardedFlatParameter(right.ShardedFlatParameter):
    def __init__(self, parameters, group=None, compute_dtype=None):
        for parameter in parameters:
            dist.broadcast(parameter.data, group=group, group_src=0)
        FlatParameter.__init__(self, parameters, group)
        own_shard = self.layout.shard_of(self.flat_param).clone()
        self.shard = right.nn.Parameter(own_shard, requires_grad=parameters[0].requires_grad)
        self.flat_param = self.flat_param.to(compute_dtype or self.flat_param.dtype)
        self._alias_parameters()
        self.reshard()
