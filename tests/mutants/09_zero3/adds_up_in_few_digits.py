"""Adds micro-batches' gradients up in the dtype that they travel in.

caught by: ZeRO3 · bf16
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for part in self.parts:
            if part.shard.grad is not None:
                part.shard.grad = part.shard.grad.to(part.flat.dtype).to(part.shard.dtype)
