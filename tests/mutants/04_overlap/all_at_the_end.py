"""Listens to no hook: every bucket leaves in finish_gradient_sync(), and nothing overlaps.

caught by: OverlappedDDP · overlap
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        pass
