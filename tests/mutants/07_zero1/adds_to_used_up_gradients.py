"""Does not check whether the gradients in the flat tensor have already been used.

caught by: ZeRO1 · stale gradients
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        self.used_up = False
        super().reduce_gradients()
