"""A parameter without a gradient on this rank is taken for one without any: its bucket never gets full.

caught by: ZeRO2 · values
"""

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    def wait(self):
        mine = [each for each in self.parameters if each.grad is not None]
        if self.finish is not None or mine:
            super().wait()
        if self.home.shard.grad is not None and not self.home.shard.grad.any():
            self.home.shard.grad = None


class ZeRO2(right.ZeRO2):
    bucket_type = Bucket
