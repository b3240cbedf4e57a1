"""Returns a Python float when all parameters are frozen.

caught by: ZeRO1 · all frozen
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def clip_grad_norm_(self, max_norm):
        return super().clip_grad_norm_(max_norm) if self.flat_parameters else 0.0
