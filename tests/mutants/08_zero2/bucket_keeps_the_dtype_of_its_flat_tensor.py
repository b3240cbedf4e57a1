"""Gives shard.grad the dtype of the flat tensor.

caught by: ShardedBucket · awkward models
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def wait(self):
        if self.in_flight is None:
            return
        mean, shard = self.in_flight.wait(), self.flat_parameter.shard
        shard.grad = mean.clone() if shard.grad is None else shard.grad + mean
        self.flat = self.views = self.in_flight = None
