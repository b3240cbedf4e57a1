"""Gives the optimizer a shard in the low-precision compute_dtype.

caught by: ShardedFlatParameter · start
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def __init__(self, parameters, group=None, compute_dtype=None):
        super().__init__(parameters, group, compute_dtype)
        self.shard.data = self.shard.data.to(self.flat_param.dtype)
