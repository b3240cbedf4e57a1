"""Rejects every step after a rejected one.

caught by: ZeRO1 · stale gradients
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    was_rejected = False

    def reduce_gradients(self):
        self.was_rejected = self.was_rejected or (
            self.used_up and any(each.holds_gradients() for each in self.gradients)
        )
        if self.was_rejected:
            raise RuntimeError("used up: call zero_grad()")
        super().reduce_gradients()
