"""Waits for each bucket in the hook that launches it.

caught by: ZeRO2 · backward continues
"""

from unittest import mock

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    def launch(self):
        super().launch()
        self.wait()


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "ShardedBucket", Bucket):
            super().__init__(*args, **options)
