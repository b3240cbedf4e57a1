"""Counts a tied weight on both stages that have it.

caught by: Pipeline · clipping
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def clip_grad_norm_(self, max_norm):
        tied, self.tied = self.tied, []
        norm = super().clip_grad_norm_(max_norm)
        self.tied = tied
        return norm
