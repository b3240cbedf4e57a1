"""Copies gradients into the flat tensor but keeps the originals in .grad: two copies after model.zero_grad().

caught by: FlatGradients · memory
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        before = [parameter.grad for parameter in self.layout.parameters]
        super().reduce()
        for parameter, gradient in zip(self.layout.parameters, before, strict=True):
            parameter.grad = gradient
