"""Divides the accumulated mean again together with the new sum.

caught by: ShardedBucket · plain model
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def wait(self):
        shard = self.flat_parameter.shard
        if self.in_flight is not None and shard.grad is not None:
            shard.grad /= right.dist.get_world_size(self.layout.group)
        super().wait()
