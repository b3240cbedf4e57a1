"""Waits for each all-gather before it launches the next one.

caught by: ShardedOptimizer · settings
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({name: value for name, value in group.items() if name != "params"})
        self.inner.step()
        for flat_parameter in self.flat_parameters:
            flat_parameter.launch_all_gather().wait()
            flat_parameter.shard.grad = None
