"""Each rank clips its part by the norm of its part: the published mistake.

caught by: ClipsGradients · values
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        return torch.nn.utils.clip_grad_norm_([each.home.shard for each in self.gradients], max_norm)
