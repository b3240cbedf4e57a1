"""Hooks keep silent inside no_sync(), finish_gradient_sync() does not.

caught by: OverlappedDDP · silence
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        self.sync.queue.finish()
