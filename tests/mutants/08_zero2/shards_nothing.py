"""Cheats by using overlapped data parallelism with the whole optimizer on every rank.

caught by: ZeRO2 · memory
"""

import torch

from solutions.overlapped_ddp import OverlappedDDP


class ZeRO2(OverlappedDDP):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__(module, bucket_cap_mb, group)
        self.optimizer = optimizer_cls(module.parameters(), **defaults)

    def step(self):
        self.optimizer.step()

    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
