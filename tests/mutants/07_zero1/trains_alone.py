"""Averages nothing: every rank's shard follows that rank's own samples.

caught by: ZeRO1 · values
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        for gradients in self.gradients:
            gradients.flat_parameter.shard.grad = gradients.layout.shard_of(gradients.flat)
