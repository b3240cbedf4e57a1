"""Keeps the dtype of every entry, of which the parameters' dtype has taken the digits.

caught by: ZeRO1 · loaded masters
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for home in (each.home for each in self.gradients):
            for value in self.inner.state[home.shard].values():
                if torch.is_tensor(value) and value.shape == home.shard.shape:
                    value.copy_(value.to(home.shard.dtype))
