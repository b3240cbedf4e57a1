"""Launches the remaining buckets without packing what is missing, so old gradients are sent again.

caught by: LaunchQueue · finish
"""

from solutions import overlapped_ddp as right


class LaunchQueue(right.LaunchQueue):
    def finish(self):
        for bucket in self.buckets[self.launched :]:
            bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
        self._begin()
