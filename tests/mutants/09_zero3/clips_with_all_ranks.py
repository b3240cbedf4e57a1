"""Adds norms up over the world, where its group is smaller.

caught by: ZeRO3 · group
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def clip_grad_norm_(self, max_norm):
        return right.clip_norm_([each.grad for each in self.shards if each.grad is not None], max_norm, None)
