"""Replaces the accumulated mean instead of adding to it.

caught by: ShardedBucket · plain model
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def wait(self):
        if self.in_flight is not None:
            self.flat_parameter.shard.grad = None
        super().wait()
