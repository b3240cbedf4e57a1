"""step() synchronizes again what the caller has synchronized already.

caught by: ZeRO2 · sent once
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def _finish_unless_synced(self):
        self.finish_gradient_sync()
