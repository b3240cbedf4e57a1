"""Launches a full bucket only when the next one is full.

caught by: ZeRO2 · overlap
"""

from unittest import mock

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    full = False

    def launch(self):
        if self.previous is not None and self.previous.full:
            self.previous.go()
        self.full = True

    def go(self):
        super().launch()
        self.full = False

    def wait(self):
        if self.full:
            self.go()
        super().wait()


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "ShardedBucket", Bucket):
            super().__init__(*args, **options)
