"""Runs the generator to its end in launch(), and waits for the handles afterwards.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        self.unsent += self.flat
        self.handle = list(self.compressor.exchange(self))

    def wait(self):
        if self.handle is None:
            raise RuntimeError("nothing is in flight")
        for handle in self.handle:
            handle.wait()
        self.handle = None
