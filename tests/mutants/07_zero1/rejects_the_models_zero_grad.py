"""Recognizes only its own zero_grad(), so it rejects valid gradients after the model's zero_grad().

caught by: ZeRO1 · loops
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        if self.used_up:
            raise RuntimeError("call this optimizer's zero_grad() before backward()")
        super().reduce_gradients()
