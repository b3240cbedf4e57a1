"""Enables communication at the end of an inner no_sync(), although the outer one is still active.

caught by: OverlappedDDP · no communication
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
