"""Clips by the norm of this rank's part.

caught by: ZeRO2 · clip
"""

import torch

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def clip_grad_norm_(self, max_norm):
        self.finish_once()
        return torch.nn.utils.clip_grad_norm_([bucket.home.shard for bucket in self.buckets], max_norm)
