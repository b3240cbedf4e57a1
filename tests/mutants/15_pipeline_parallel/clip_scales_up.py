"""Scales small gradients up.

caught by: Pipeline · clipping
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def clip_grad_norm_(self, max_norm):
        norm = super().clip_grad_norm_(float("inf"))
        for parameter in self.own.values():
            parameter.grad *= max_norm / (norm + 1e-6)
        return norm
