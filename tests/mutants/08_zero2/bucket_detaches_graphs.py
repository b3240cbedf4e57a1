"""Silently detaches a gradient that is part of a graph.

caught by: ShardedBucket · rejections
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def pack(self, index):
        parameter = self.parameters[index]
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()
        super().pack(index)
