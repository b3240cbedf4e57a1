"""After a refusal every later step is refused too.

caught by: ShardedOptimizer · used up
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    spoilt = False

    def reduce_gradients(self):
        self.spoilt = self.spoilt or (self.used_up and any(each.still_there() for each in self.gradients))
        if self.spoilt:
            raise RuntimeError("used up: call zero_grad()")
        super().reduce_gradients()
