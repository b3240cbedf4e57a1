"""Adds the mean again when finish_gradient_sync() is called a second time.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def finish_gradient_sync(self):
        for bucket in self.buckets if self.synced and self.sync.enabled else ():
            bucket.flat_parameter.shard.grad *= 2
        super().finish_gradient_sync()
