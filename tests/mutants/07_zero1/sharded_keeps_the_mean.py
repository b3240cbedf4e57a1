"""Leaves the mean gradient in shard.grad after a step.

caught by: ShardedOptimizer · plain
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        means = [flat_parameter.shard.grad for flat_parameter in self.flat_parameters]
        super().update_parameters()
        for flat_parameter, mean in zip(self.flat_parameters, means, strict=True):
            flat_parameter.shard.grad = mean
