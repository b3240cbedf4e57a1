"""All-gathers before the inner optimizer updates the shards, so ranks get each other's old shards.

caught by: ShardedOptimizer · plain
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        for work in [each.launch_all_gather() for each in self.flat_parameters]:
            work.wait()
        self.inner.step()
        for flat_parameter in self.flat_parameters:
            flat_parameter.shard.grad = None
