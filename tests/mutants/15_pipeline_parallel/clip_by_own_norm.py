"""Clips each stage by its own norm.

caught by: Pipeline · plain norm
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def clip_grad_norm_(self, max_norm):
        return right.torch.nn.utils.clip_grad_norm_(self.own.values(), max_norm).double()
