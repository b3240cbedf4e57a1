"""Converts every entry to the parameters' dtype, which rounds the float32 masters of bf16 parameters.

caught by: ZeRO1 · loaded masters
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for shard in [each.shard for each in self.flat_parameters]:
            for name, value in self.inner.state[shard].items():
                if torch.is_tensor(value) and value.shape == shard.shape:
                    self.inner.state[shard][name] = value.to(shard.dtype)
