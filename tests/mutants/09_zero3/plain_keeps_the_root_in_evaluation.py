"""Keeps the root unsharded after a forward without gradients.

caught by: PlainZeRO3 · forward memory
"""

import torch

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def forward(self, *inputs):
        self.prefetcher.begin_forward()
        return self.module(*inputs)

    def post_forward(self, unit, submodule, inputs, output):
        if unit is not self.root or torch.is_grad_enabled():
            super().post_forward(unit, submodule, inputs, output)
