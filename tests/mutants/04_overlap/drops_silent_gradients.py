"""Clears the gradients at the end of no_sync(), so they are never averaged.

caught by: OverlappedDDP · accumulation
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        if self.sync.enabled:
            self.zero_grad()
