"""Keeps the last mean in reset(), and the next reduce() uses it as the new one.

caught by: FlatGradients · slices
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reset(self):
        mean = self.flat_parameter.shard.grad
        super().reset()
        self.flat_parameter.shard.grad = mean
