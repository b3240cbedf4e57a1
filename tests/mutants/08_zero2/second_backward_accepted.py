"""Silently ignores a second gradient for a bucket that is already in flight.

caught by: ZeRO2 · rejections
"""

from unittest import mock

from solutions import zero2 as right


class Sync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        if index in self.queue.missing[bucket_index]:
            super().on_gradient(bucket_index, index)


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "GradientSync", Sync):
            super().__init__(*args, **options)
