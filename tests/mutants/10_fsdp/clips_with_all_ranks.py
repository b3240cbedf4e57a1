"""Computes the norm over all ranks, although its group is smaller.

caught by: ZeRO3 · group
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def clip_grad_norm_(self, max_norm):
        return right.clip_shards_([each.grad for each in self.shards if each.grad is not None], max_norm, None)
