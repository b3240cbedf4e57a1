"""Keeps its handle after wait(), so a second wait() does nothing.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def wait(self):
        self.handle.wait()
        for handle in self.stages:
            handle.wait()
