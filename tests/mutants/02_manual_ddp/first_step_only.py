"""Synchronizes gradients in the first step only.

caught by: ManualDDP · values
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    done = False

    def finish_gradient_sync(self):
        if not self.done:
            super().finish_gradient_sync()
        self.done = True
