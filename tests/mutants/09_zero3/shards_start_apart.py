"""Each rank shards what it has itself.

caught by: ShardedParameters · start
"""

from solutions import zero3 as right


class ShardedParameters(right.ShardedParameters):
    def __init__(self, parameters, group=None, compute_dtype=None):
        right.FlatParameters.__init__(self, parameters, group)
        trains = parameters[0].requires_grad
        self.shard = right.nn.Parameter(self.own(self.flat).clone(), requires_grad=trains)
        self.flat = self.flat.to(compute_dtype or self.flat.dtype)
        self._move_in()
        self.free()
