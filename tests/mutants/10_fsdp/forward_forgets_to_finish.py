"""Starts a forward while the gradients of an earlier micro-batch are still pending.

caught by: ZeRO3 · accumulation
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    @property
    def pending(self):
        return False

    @pending.setter
    def pending(self, value):
        pass
