"""Continues the generator before the first collective is complete.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def wait(self):
        for handle in self.stages:
            handle.wait()
        self.handle = self.stages = None
