"""Clips once per step() call: after a skipped step, new gradients are not clipped.

caught by: ZeRO1 · skipped step
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    norm = None

    def clip_grad_norm_(self, max_norm):
        if self.norm is None:
            self.norm = super().clip_grad_norm_(max_norm)
        return self.norm

    def step(self, closure=None):
        self.norm = None
        return super().step(closure)
