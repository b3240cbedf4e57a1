"""Keeps every unit unsharded after its forward.

caught by: PlainZeRO3 · forward memory
"""

import torch

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def post_forward(self, unit, submodule, inputs, output):
        if torch.is_grad_enabled():
            self._watch_outputs(unit, output)
        else:
            super().post_forward(unit, submodule, inputs, output)
