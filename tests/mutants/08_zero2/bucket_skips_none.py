"""Reuses its flat tensor, in which a missing gradient leaves the previous one.

caught by: ShardedBucket · awkward models
"""

from solutions import zero2 as right


class ShardedBucket(right.ShardedBucket):
    kept = None

    def pack(self, index):
        if self.flat is None and self.kept is not None:
            self.flat, self.views = self.kept
        if self.flat is None or self.parameters[index].grad is not None:
            super().pack(index)
        self.kept = self.flat, self.views
