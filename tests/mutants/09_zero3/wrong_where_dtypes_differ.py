"""Averages once more where the optimizer's dtype is not the model's.

caught by: ZeRO3 · bf16
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for part in self.parts:
            if part.shard.grad is not None and part.shard.dtype != part.flat.dtype:
                part.shard.grad /= len(self.parts)
