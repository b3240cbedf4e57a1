"""Adds shards to the inner optimizer without their settings, which it gets only in the first step.

caught by: ShardedOptimizer · settings
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.inner.param_groups.pop()
        self.inner.add_param_group({"params": group["params"]})
