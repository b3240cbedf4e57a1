"""Keeps the flat tensor for the next time.

caught by: ShardedBucket · memory
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def wait(self):
        kept = self.flat
        super().wait()
        self.kept = kept
