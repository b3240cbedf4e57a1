"""Sets .grad to None in reset(): backward puts every gradient in memory of its own.

caught by: FlatGradients · slices
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reset(self):
        super().reset()
        for parameter in self.layout.parameters:
            parameter.grad = None
