"""Synchronizes in step() even if the caller has already done so.

caught by: ZeRO2 · sent once
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def _finish_unless_synced(self):
        self.finish_gradient_sync()
