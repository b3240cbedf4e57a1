"""Keeps its handle after wait(), so a second wait() does nothing.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def wait(self):
        if self.handle is None:
            raise RuntimeError("nothing is in flight")
        self.handle.wait()
        for handle in self.stages:
            handle.wait()
