"""Adds a gradient to what its view contains from the step before, instead of copying it.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.flat_parameter.shard.grad is not None and self.holds_gradients():
            return
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is not None and parameter.grad is not view:
                view.add_(parameter.grad)
                parameter.grad = view
        super().reduce()
