"""Cares for every Exception that leaves no_sync(); a KeyboardInterrupt is none.

caught by: OverlappedDDP · exceptions
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        enabled, self.sync.enabled = self.sync.enabled, False
        try:
            yield
        except Exception:
            self.sync.enabled = enabled
            raise
        self.sync.enabled = enabled
