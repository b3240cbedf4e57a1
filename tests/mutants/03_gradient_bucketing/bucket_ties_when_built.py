"""Makes the slices the gradients when it is created, so that a gradient is no longer None before backward.

caught by: Bucket · one copy
"""

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        for parameter, piece in zip(self.parameters, self.slices, strict=True):
            parameter.grad = piece
