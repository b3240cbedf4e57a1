"""Finishes the queue without its GradientSync, which then believes that gradients are still pending.

caught by: OverlappedDDP · pending
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        self.sync.queue.finish()
