"""Copies the whole param group to the inner optimizer, which then updates the parameters instead of the shards.

caught by: ShardedOptimizer · plain
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update(group)
        super().update_parameters()
