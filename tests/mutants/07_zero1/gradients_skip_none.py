"""Skips gradients that are None, so what was in their slices before is sent again.

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reset(self):
        super().reset()
        self.flat += 1e-3  # what an earlier step may have left

    def reduce(self):
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view
        super().reduce()
