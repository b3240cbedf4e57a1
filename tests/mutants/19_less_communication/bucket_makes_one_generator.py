"""Makes the generator once, so the second step has nothing to run.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        self.unsent += self.flat
        self.stages = self.stages or self.compressor.exchange(self)
        self.handle = next(self.stages)

    def wait(self):
        if self.handle is None:
            raise RuntimeError("nothing is in flight")
        self.handle.wait()
        for handle in self.stages:
            handle.wait()
        self.handle = None
