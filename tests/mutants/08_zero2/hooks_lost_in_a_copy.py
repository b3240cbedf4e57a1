"""Registers no hooks on a deep copy.

caught by: ZeRO2 · copies
"""

from unittest import mock

from solutions import zero2 as right


class Sync(right.GradientSync):
    def __setstate__(self, state):
        self.__dict__.update(state)


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "GradientSync", Sync):
            super().__init__(*args, **options)
