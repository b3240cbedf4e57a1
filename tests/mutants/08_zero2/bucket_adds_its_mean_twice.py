"""Adds the mean again when wait() is called a second time.

caught by: ShardedBucket · plain model
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    mean = None

    def wait(self):
        if self.in_flight is None and self.mean is not None:
            self.flat_parameter.shard.grad += self.mean
        super().wait()
        self.mean = self.flat_parameter.shard.grad.clone()
