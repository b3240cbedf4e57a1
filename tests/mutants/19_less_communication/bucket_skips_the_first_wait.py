"""Continues the generator before the first collective is complete.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def wait(self):
        if self.handle is None:
            raise RuntimeError("nothing is in flight")
        for handle in self.stages:
            handle.wait()
        self.handle = self.stages = None
