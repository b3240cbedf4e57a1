"""Launches nothing before wait(), so nothing overlaps.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        self.unsent += self.flat

    def wait(self):
        for handle in self.compressor.exchange(self):
            handle.wait()
