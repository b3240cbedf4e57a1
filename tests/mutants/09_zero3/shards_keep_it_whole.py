"""Keeps the full parameters in addition to the shard.

caught by: ShardedFlatParameter · memory
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def __init__(self, parameters, group=None, compute_dtype=None):
        self.master = [each.detach().clone() for each in parameters]
        super().__init__(parameters, group, compute_dtype)
