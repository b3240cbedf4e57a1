"""Collects the parameters after each backward, though only a step has changed them.

caught by: ZeRO2 · micro-batches
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for bucket in self.buckets if self.syncs else []:
            bucket.home.gather().wait()
