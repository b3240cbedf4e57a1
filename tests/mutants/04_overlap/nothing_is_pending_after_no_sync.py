"""Sets pending to False when no_sync() ends, although the gradients are not averaged yet.

caught by: OverlappedDDP · pending afterwards
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            try:
                yield
            finally:
                self.sync.pending = False
