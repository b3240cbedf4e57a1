"""Launches the rest as it is: what did not come is still last step's.

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
