"""Flattens parameters that join later but does not give their shards to the inner optimizer.

caught by: ShardedOptimizer · more parameters
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if self.inner.state:
            self.inner.param_groups[-1]["params"] = []
