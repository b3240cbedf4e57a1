"""Treats finish_gradient_sync() inside no_sync() as done although nothing was sent, so the step updates nothing.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self.synced, self.sync.pending = True, False
