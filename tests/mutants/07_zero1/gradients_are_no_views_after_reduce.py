"""Copies each gradient into its view, but drops .grad instead of making it the view.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        given = [parameter.grad for parameter in self.layout.parameters]
        super().reduce()
        for parameter, view, gradient in zip(self.layout.parameters, self.views, given, strict=True):
            parameter.grad = view if gradient is view else None
