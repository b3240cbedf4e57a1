"""Treats a forward recomputed by activation checkpointing like any other and reshards the unit that backward needs.

caught by: ZeRO3 · checkpoints
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def post_forward(self, unit, submodule, inputs, output):
        if unit is not self.root:
            self.calls.setdefault(unit, right.Call())
            self._watch_outputs(unit, output)
            unit.reshard()
        else:
            super().post_forward(unit, submodule, inputs, output)
