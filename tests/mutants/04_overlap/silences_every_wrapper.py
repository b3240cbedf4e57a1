"""Stores the no_sync() state in the class, so one wrapper's no_sync() affects all wrappers.

caught by: OverlappedDDP · no communication
"""

import contextlib

from solutions import overlapped_ddp as right


class _Sync(right.GradientSync):
    silent = 0

    @property
    def enabled(self):
        return not _Sync.silent

    @enabled.setter
    def enabled(self, _):
        pass

    @contextlib.contextmanager
    def no_sync(self):
        _Sync.silent += 1
        try:
            yield
        finally:
            _Sync.silent -= 1


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.sync = _Sync(self.buckets)
