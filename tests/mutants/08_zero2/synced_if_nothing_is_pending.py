"""Decides by `pending`: inside no_sync(), a rank without a backward() then counts as synchronized, and others do not.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        self.synced = not self.sync.pending
