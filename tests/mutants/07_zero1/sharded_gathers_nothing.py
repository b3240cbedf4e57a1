"""Updates this rank's shard but gathers no others, so every rank has parameters of its own.

caught by: ShardedOptimizer · plain
"""

from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        self.inner.step()
        for flat_parameter in self.flat_parameters:
            flat_parameter.shard.grad = None
