"""Leaves calls that backward never reached open after finish_gradient_sync().

caught by: ZeRO3 · memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def finish_gradient_sync(self):
        kept = [(unit, list(unit.open_calls)) for unit in self.units]
        super().finish_gradient_sync()
        for unit, calls in kept:
            unit.open_calls.update(calls)
