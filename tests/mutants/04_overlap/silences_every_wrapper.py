"""Remembers no_sync() in the class: one wrapper's silences all.

caught by: OverlappedDDP · silence
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    silent = 0

    @property
    def syncs(self):
        return not OverlappedDDP.silent

    @syncs.setter
    def syncs(self, _):
        pass

    @contextlib.contextmanager
    def no_sync(self):
        OverlappedDDP.silent += 1
        try:
            yield
        finally:
            OverlappedDDP.silent -= 1
