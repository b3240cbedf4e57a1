"""Looks at its own memory only: after model.zero_grad() gradients are somewhere else.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.home.shard.grad is None:
            for parameter, piece in zip(self.home.parameters, self.slices, strict=True):
                parameter.grad = piece
        super().reduce()
