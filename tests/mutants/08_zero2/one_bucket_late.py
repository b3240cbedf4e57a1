"""A full bucket is launched when the next one is full.

caught by: ZeRO2 · overlap
"""

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    full = False

    def launch(self):
        if self.before is not None and self.before.full:
            self.before.go()
        self.full = True

    def go(self):
        super().launch()
        self.full = False

    def wait(self):
        if self.full:
            self.go()
        super().wait()


class ZeRO2(right.ZeRO2):
    bucket_type = Bucket
