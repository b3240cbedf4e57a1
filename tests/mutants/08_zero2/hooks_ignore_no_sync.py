"""Ignores no_sync(): buckets are launched inside it too.

caught by: ZeRO2 · micro-batches
"""

import contextlib

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.finish_gradient_sync()
