"""Waits for two collectives, and never for a third.

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
            next(self.stages, None)
            break
        self.handle = self.stages = None
