"""Reduces again when it is asked again: the mean of what is left.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        self.home.shard.grad = None
        super().reduce()
