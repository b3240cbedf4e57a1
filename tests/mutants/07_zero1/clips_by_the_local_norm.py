"""Clips each rank's shard by the norm of that shard, a mistake found in published code.

caught by: ZeRO1 · clipping
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        return torch.nn.utils.clip_grad_norm_([each.shard for each in self.flat_parameters], max_norm)
