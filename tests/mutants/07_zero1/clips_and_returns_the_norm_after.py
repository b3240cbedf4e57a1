"""Returns the norm after clipping instead of the one before.

caught by: ZeRO1 · clipping
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def clip_grad_norm_(self, max_norm):
        return super().clip_grad_norm_(max_norm).clamp(max=max_norm)
