"""Divides by the world size instead of the size of the bucket's group.

caught by: ShardedBucket · awkward models
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def pack(self, index):
        gradient = self.parameters[index].grad
        if gradient is not None:
            gradient *= right.dist.get_world_size(self.layout.group) / right.dist.get_world_size()
        super().pack(index)
