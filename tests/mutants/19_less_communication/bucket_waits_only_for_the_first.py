"""Continues the generator without waiting for its later handles.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def wait(self):
        self.handle.wait()
        for _ in self.stages:
            pass
        self.handle = self.stages = None
