"""Registers no hooks on a deep copy: the values are right, but nothing overlaps.

caught by: OverlappedDDP · several wrappers
"""

from solutions import overlapped_ddp as right


class _Sync(right.GradientSync):
    def __setstate__(self, state):
        self.__dict__.update(state)


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.sync = _Sync(self.buckets)
