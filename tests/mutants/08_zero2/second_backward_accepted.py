"""A second backward() begins a bucket anew that is still under way.

caught by: ZeRO2 · refusals
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def _on_gradient(self, parameter):
        number, place = self._place_of[parameter]
        if place in self.queue.missing[number]:
            super()._on_gradient(parameter)
