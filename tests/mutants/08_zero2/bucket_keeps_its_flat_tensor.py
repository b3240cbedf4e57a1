"""Does not free the flat tensor after wait().

caught by: ShardedBucket · memory
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    def wait(self):
        kept = self.flat
        super().wait()
        self.kept = kept
