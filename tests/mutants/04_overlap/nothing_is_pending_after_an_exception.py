"""Restores also `pending` after an exception in no_sync(), although the block has accumulated gradients.

caught by: OverlappedDDP · exceptions
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        pending = self.sync.pending
        with super().no_sync():
            try:
                yield
            except BaseException:
                self.sync.pending = pending
                raise
