"""Keeps the old mean although model.zero_grad() was called and there are new gradients.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.flat_parameter.shard.grad is None:
            super().reduce()
