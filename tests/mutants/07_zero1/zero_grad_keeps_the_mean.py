"""Fills the gradients with zeros in zero_grad(), but keeps the mean of gradients that no step has used.

caught by: ZeRO1 · discarded mean
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def zero_grad(self, set_to_none=True):
        self.used_up = False
        for gradients in self.gradients:
            mean = gradients.flat_parameter.shard.grad
            gradients.reset()
            gradients.flat_parameter.shard.grad = mean
