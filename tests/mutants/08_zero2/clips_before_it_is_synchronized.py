"""Clips nothing if the gradients have not been synchronized yet.

caught by: ZeRO2 · clipping
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def clip_grad_norm_(self, max_norm):
        if not self.synced:
            return right.torch.zeros(())
        return super().clip_grad_norm_(max_norm)
