"""Ignores no_sync(): hooks launch buckets inside it too.

caught by: OverlappedDDP · no communication
"""

import contextlib

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        yield
