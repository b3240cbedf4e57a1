"""Enables communication at the end of finish(), even inside no_sync().

caught by: GradientSync · disabled
"""

from solutions import overlapped_ddp as right


class GradientSync(right.GradientSync):
    def finish(self):
        super().finish()
        self.enabled = True
