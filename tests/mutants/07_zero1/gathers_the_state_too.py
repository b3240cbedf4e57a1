"""Collects the optimizer's state on every rank before it steps, as some texts say ZeRO-1 does.

caught by: ShardedOptimizer · wire
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        for shard in [each.home.shard for each in self.gradients]:
            for value in self.inner.state.get(shard, {}).values():
                if torch.is_tensor(value) and value.shape == shard.shape:
                    right.collect(value, self.group, None)
        return super().step(closure)
