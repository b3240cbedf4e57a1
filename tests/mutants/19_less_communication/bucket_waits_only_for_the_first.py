"""Continues the generator without waiting for its later handles.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def wait(self):
        if self.handle is None:
            raise RuntimeError("nothing is in flight")
        self.handle.wait()
        for _ in self.stages:
            pass
        self.handle = self.stages = None
