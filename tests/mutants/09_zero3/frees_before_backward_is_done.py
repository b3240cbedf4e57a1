"""A unit goes when it has all its gradients, and backward still needs what is frozen in it.

caught by: ReducesGradients · values
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _on_gradient(self, parameter):
        super()._on_gradient(parameter)
        unit = self._unit_of[self._place_of[parameter][0]]
        if not any(self.queue.missing[each] for each in self._numbers_of(unit)):
            unit.reshard()
