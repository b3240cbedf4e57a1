"""Sums the gradients without dividing.

caught by: ShardedBucket · plain model
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def pack(self, index):
        gradient = self.parameters[index].grad
        if gradient is not None:
            gradient *= right.dist.get_world_size(self.layout.group)
        super().pack(index)
