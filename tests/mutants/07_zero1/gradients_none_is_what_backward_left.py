"""Does not zero the slice of a gradient that is None, although backward() may have written into it before.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view
        super().reduce()
