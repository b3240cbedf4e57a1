"""Copies the gradient into the bucket but does not free the original.

caught by: ShardedBucket · plain model
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def pack(self, index):
        gradient = self.parameters[index].grad
        super().pack(index)
        self.parameters[index].grad = gradient
