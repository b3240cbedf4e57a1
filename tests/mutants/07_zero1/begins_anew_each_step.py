"""Makes a new inner optimizer in every step, without the state of the last.

caught by: ShardedOptimizer · values
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        self.inner.state.clear()
        return super().step(closure)
