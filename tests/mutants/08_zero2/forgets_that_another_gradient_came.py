"""Does not synchronize again after another backward, so its gradients are never used.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def _finish_unless_synced(self):
        if not self.synced:
            self.finish_gradient_sync()
