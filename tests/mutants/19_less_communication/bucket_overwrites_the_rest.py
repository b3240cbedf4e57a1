"""Replaces what is unsent by the new gradients instead of adding them.

caught by: CompressedBucket · unsent
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        self.unsent.copy_(self.flat)
        self.stages = self.compressor.exchange(self)
        self.handle = next(self.stages)
