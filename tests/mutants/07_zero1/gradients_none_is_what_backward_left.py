"""Takes a gradient that is None for zeros already: backward() may have written into its slice before.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        for parameter, piece in zip(self.home.parameters, self.slices, strict=True):
            if parameter.grad is None:
                parameter.grad = piece
        super().reduce()
