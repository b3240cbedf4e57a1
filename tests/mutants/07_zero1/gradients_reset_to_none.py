"""Sets .grad to None in reset(), so backward allocates new memory for every gradient.

caught by: FlatGradients · slices
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reset(self):
        super().reset()
        for parameter in self.layout.parameters:
            parameter.grad = None
