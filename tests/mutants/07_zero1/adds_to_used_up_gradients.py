"""Takes whatever is in the flat gradients for this step's.

caught by: ZeRO1 · used up
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        self.used_up = False
        super().reduce_gradients()
