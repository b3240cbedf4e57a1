"""Goes home where there is nothing to do: a rank without a gradient skips the step, and the others wait for it.

caught by: ShardedOptimizer · loops
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        if closure is None and all(p.grad is None for group in self.param_groups for p in group["params"]):
            return None
        return super().step(closure)
