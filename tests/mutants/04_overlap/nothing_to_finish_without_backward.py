"""Skips finish() on a rank without gradients, while the other ranks wait for it.

caught by: OverlappedDDP · steps
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def finish_gradient_sync(self):
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            super().finish_gradient_sync()
