"""Listens to no hook: every bucket leaves in finish_gradient_sync(), and nothing overlaps.

caught by: ZeRO2 · overlap
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def _on_gradient(self, parameter):
        self.synced = False
