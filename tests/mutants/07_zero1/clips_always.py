"""Scales every gradient to a norm of max_norm, even if it was smaller.

caught by: ZeRO1 · below the bound
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def clip_grad_norm_(self, max_norm):
        norm = super().clip_grad_norm_(max_norm)
        if norm < max_norm:
            for flat_parameter in self.flat_parameters:
                flat_parameter.shard.grad *= max_norm / norm
        return norm
