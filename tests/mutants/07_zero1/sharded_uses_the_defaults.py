"""Gives the inner optimizer its defaults instead of the settings of the param group.

caught by: ShardedOptimizer · settings
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        settings = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            group.update(self.defaults)
        super().update_parameters()
        for group, own in zip(self.param_groups, settings, strict=True):
            group.update(own)
