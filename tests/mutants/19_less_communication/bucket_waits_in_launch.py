"""Waits for the first collective in launch(), and so blocks backward.

caught by: CompressedBucket · order
"""

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def launch(self):
        super().launch()
        self.handle.wait()
