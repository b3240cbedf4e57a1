"""Each rank clips its shard by the norm of its shard: the published mistake.

caught by: ZeRO1 · clipping
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        return torch.nn.utils.clip_grad_norm_([each.shard for each in self.flat_parameters], max_norm)
