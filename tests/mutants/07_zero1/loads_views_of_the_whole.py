"""Keeps its part as a view of a whole flat tensor: as much memory as without sharding.

caught by: ZeRO1 · part only
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for home in (each.home for each in self.gradients):
            for name, value in self.inner.state[home.shard].items():
                if torch.is_tensor(value) and value.shape == home.shard.shape:
                    own = home.own(home.new_flat().to(value.dtype))
                    self.inner.state[home.shard][name] = own.copy_(value)
