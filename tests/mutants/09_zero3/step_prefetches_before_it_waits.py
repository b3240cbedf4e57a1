"""Calls the prefetcher first in forward, so a unit's own all-gather queues behind that of the next unit.

caught by: PrefetchingZeRO3 · prefetched order
"""

import torch

from solutions.units import UnitState
from solutions.zero3 import ZeRO3


class PrefetchingZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def pre_forward(self, unit, submodule, inputs, kwargs):
        if unit.state is UnitState.BACKWARD:
            return None
        if unit is not self.root:
            self.prefetcher.in_forward(unit)
        unit.wait_for_unshard()
        return self._watch_inputs(unit, inputs, kwargs) if torch.is_grad_enabled() else None
