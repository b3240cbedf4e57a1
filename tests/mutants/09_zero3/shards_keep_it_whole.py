"""Keeps the whole parameters beside the part, in full precision.

caught by: ShardedParameters · memory
"""

from solutions import zero3 as right


class ShardedParameters(right.ShardedParameters):
    def __init__(self, parameters, group=None, compute_dtype=None):
        self.master = [each.detach().clone() for each in parameters]
        super().__init__(parameters, group, compute_dtype)
