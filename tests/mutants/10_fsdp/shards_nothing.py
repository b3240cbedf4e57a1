"""Cheats by keeping everything on every rank and averaging gradients.

caught by: ZeRO3 · parameters
"""

from solutions.overlapped_ddp import OverlappedDDP


class ZeRO3(OverlappedDDP):
    def __init__(self, module, units=None, compute_dtype=None, prefetch=1, reshard_after_forward=True, group=None):
        super().__init__(module, group=group)

    def full_state_dict(self):
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}
