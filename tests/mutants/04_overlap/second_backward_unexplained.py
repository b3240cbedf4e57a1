"""Refuses a second backward() with an inner assertion.

caught by: OverlappedDDP · refusals
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        number, place = self._place_of[parameter]
        assert place in self.queue.missing[number]
        super()._on_gradient(parameter)
