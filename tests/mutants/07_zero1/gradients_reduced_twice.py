"""Reduces again when it is called again, although only the mean is left.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        self.flat_parameter.shard.grad = None
        super().reduce()
