"""Shards each rank's own initial values, without a broadcast.

caught by: ShardedFlatParameter · start
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def __init__(self, parameters, group=None, compute_dtype=None):
        right.FlatParameter.__init__(self, parameters, group)
        own = self.layout.shard_of(self.flat_param).clone()
        self.shard = right.nn.Parameter(own, requires_grad=parameters[0].requires_grad)
        self.flat_param = self.flat_param.to(compute_dtype or self.flat_param.dtype)
        self._alias_parameters()
        self.reshard()
