"""Stores the scale and applies it in the next step, to whatever gradients there are by then.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    scale = 1.0

    def clip_grad_norm_(self, max_norm):
        self._finish_unless_synced()
        norm = self.optimizer.clip_grad_norm_(float("inf"))
        self.scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm

    def step(self):
        self._finish_unless_synced()
        for bucket in self.buckets:
            bucket.flat_parameter.shard.grad *= self.scale
        self.scale = 1.0
        super().step()
