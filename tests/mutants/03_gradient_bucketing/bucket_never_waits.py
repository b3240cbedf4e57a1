"""Never waits for the all-reduce, so the slices may not hold the mean yet.

caught by: Bucket · waits
"""

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def wait(self):
        pass
