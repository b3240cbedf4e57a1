"""Treats a forward that activation checkpointing runs in backward like any other.

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
