"""Reduces again if any .grad is not a view, although reduce() was already called.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def holds_gradients(self):
        pairs = zip(self.layout.parameters, self.views, strict=True)
        return all(parameter.grad is view for parameter, view in pairs)
