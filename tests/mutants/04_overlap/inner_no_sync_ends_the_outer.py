"""Leaving an inner no_sync() switches messages on, though the outer one goes on.

caught by: OverlappedDDP · silence
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self.sync.enabled = False
        try:
            yield
        finally:
            self.sync.enabled = True
