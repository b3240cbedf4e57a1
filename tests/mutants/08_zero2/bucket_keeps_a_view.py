"""Makes shard.grad a view of the flat tensor, which keeps all of that memory alive.

caught by: ShardedBucket · memory
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def wait(self):
        if self.in_flight is None or self.flat_parameter.shard.grad is not None:
            return super().wait()
        own = self.layout.shard_of(self.flat)
        super().wait()
        self.flat_parameter.shard.grad = own.copy_(self.flat_parameter.shard.grad)
