"""Counts as synchronized after finish_gradient_sync() inside no_sync(), although nothing was sent.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self.synced = True
