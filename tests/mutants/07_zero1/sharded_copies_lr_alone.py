"""Copies only the learning rate to the inner optimizer, although schedulers change betas and momentum too.

caught by: ShardedOptimizer · settings
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group["lr"] = group["lr"]
        self.inner.step()
        for work in [each.launch_all_gather() for each in self.flat_parameters]:
            work.wait()
        for flat_parameter in self.flat_parameters:
            flat_parameter.shard.grad = None
