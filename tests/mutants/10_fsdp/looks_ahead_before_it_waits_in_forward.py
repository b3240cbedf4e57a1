"""Prefetches before it launches the unit's own all-gather, which then queues behind that of the next unit.

caught by: ZeRO3 · forward order
"""

import torch

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def pre_forward(self, unit, submodule, inputs, kwargs):
        if unit.state is right.UnitState.BACKWARD:
            return None
        if unit is not self.root:
            self.prefetcher.in_forward(unit)
        unit.wait_for_unshard()
        return self._watch_inputs(unit, inputs, kwargs) if torch.is_grad_enabled() else None
