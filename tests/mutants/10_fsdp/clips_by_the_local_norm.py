"""Clips each rank's shards by the norm of those shards alone.

caught by: ZeRO3 · clip
"""

import torch

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(list(self.parameters()), max_norm)
