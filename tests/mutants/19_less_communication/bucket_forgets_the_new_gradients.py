"""Sends what is unsent before it adds the new gradients, so each step is one step late.

caught by: CompressedBucket · unsent
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        new = self.flat.clone()
        self.stages = self.compressor.exchange(self)
        self.handle = next(self.stages)
        self.unsent += new
