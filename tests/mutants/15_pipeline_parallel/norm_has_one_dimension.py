"""Returns a norm with one element and one dimension.

caught by: Pipeline · plain norm
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def clip_grad_norm_(self, max_norm):
        return super().clip_grad_norm_(max_norm).reshape(1)
