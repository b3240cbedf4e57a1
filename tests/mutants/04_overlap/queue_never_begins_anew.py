"""Treats all buckets as launched after the first step.

caught by: LaunchQueue · order
"""

from solutions import overlapped_ddp as right


class LaunchQueue(right.LaunchQueue):
    def finish(self):
        super().finish()
        self.launched = len(self.buckets)
