"""Averages no gradients: every rank updates its shard from its own samples only.

caught by: ZeRO1 · values
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        for gradients in self.gradients:
            gradients.flat_parameter.shard.grad = gradients.layout.shard_of(gradients.flat)
