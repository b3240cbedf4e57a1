"""Gathers each unit once, and keeps it until backward has ended.

caught by: GathersForForward · memory
"""

import torch

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _after_forward(self, unit, module, inputs, output):
        if torch.is_grad_enabled() and unit.state is not right.UnitState.BACKWARD:
            self._called(unit, output)
