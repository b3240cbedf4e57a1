"""Every finish_gradient_sync() replaces the gradients of the one before.

caught by: ZeRO2 · accumulation
"""

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    def wait(self):
        if self.finish is not None:
            self.home.shard.grad = None
        super().wait()


class ZeRO2(right.ZeRO2):
    bucket_type = Bucket
