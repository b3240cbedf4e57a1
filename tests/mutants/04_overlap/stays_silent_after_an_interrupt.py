"""Cares for every Exception that leaves no_sync(); a KeyboardInterrupt is none.

caught by: OverlappedDDP · exceptions
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        before, self.syncs = self.syncs, False
        try:
            yield
        except Exception:
            self.syncs = before
            raise
        self.syncs = before
