"""Refuses used-up gradients with an inner assertion.

caught by: ShardedOptimizer · used up
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        assert not (self.used_up and any(each.still_there() for each in self.gradients))
        super().reduce_gradients()
