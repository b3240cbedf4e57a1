"""Does not look at gradients inside no_sync(): they are added to what is under way.

caught by: OverlappedDDP · refusals
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        if self.syncs:
            super()._on_gradient(parameter)
