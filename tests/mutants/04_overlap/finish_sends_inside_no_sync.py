"""Disables the hooks inside no_sync() but not finish_gradient_sync().

caught by: OverlappedDDP · no communication
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        self.sync.queue.finish()
