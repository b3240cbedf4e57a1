"""Ignores gradients outside its flat tensor, which is where they are after model.zero_grad().

caught by: FlatGradients · values
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.flat_parameter.shard.grad is None:
            for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                parameter.grad = view
        super().reduce()
