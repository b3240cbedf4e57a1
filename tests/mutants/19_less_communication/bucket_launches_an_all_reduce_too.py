"""Also launches the all-reduce of an uncompressed bucket, and never waits for it.

caught by: CompressedBucket · unsent
"""

from solutions import bucketed_ddp
from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        self.unsent += self.flat
        bucketed_ddp.Bucket.launch(self)
        self.stages = self.compressor.exchange(self)
        self.handle = next(self.stages)
