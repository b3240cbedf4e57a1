"""Ignores zero_grad() after clip_grad_norm_() unless there was a step in between.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    was_clipped = False

    def clip_grad_norm_(self, max_norm):
        norm = super().clip_grad_norm_(max_norm)
        self.was_clipped = True
        return norm

    def step(self):
        super().step()
        self.was_clipped = False

    def zero_grad(self, set_to_none=True):
        if self.was_clipped:
            self.synced = self.was_clipped = False
        else:
            super().zero_grad()
