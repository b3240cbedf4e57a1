"""A second backward() adds to buckets that are under way, and nobody hears of it.

caught by: OverlappedDDP · refusals
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        number, place = self._place_of[parameter]
        if place in self.queue.missing[number]:
            super()._on_gradient(parameter)
