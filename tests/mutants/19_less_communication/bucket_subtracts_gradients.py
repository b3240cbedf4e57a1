"""Adds the gradients with the wrong sign.

caught by: CompressedBucket · unsent
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        self.unsent -= self.flat
        self.stages = self.compressor.exchange(self)
        self.handle = next(self.stages)
