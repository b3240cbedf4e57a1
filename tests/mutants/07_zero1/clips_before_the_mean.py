"""Clips the local gradients before they are averaged.

caught by: ZeRO1 · clipping
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def clip_grad_norm_(self, max_norm):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
