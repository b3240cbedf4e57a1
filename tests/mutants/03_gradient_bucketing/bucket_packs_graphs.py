"""Silently detaches a gradient that is part of a graph.

caught by: Bucket · graphs
"""

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def pack(self, index):
        parameter = self.parameters[index]
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()
        super().pack(index)
