"""The part that the optimizer steps has few digits.

caught by: ShardedParameters · start
"""

from solutions import zero3 as right


class ShardedParameters(right.ShardedParameters):
    def __init__(self, parameters, group=None, compute_dtype=None):
        super().__init__(parameters, group, compute_dtype)
        self.shard.data = self.shard.data.to(self.flat.dtype)
