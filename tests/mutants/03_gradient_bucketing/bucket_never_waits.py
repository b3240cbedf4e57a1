"""Launches, and takes what is in the slices for the mean at once.

caught by: Bucket · waits
"""

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def wait(self):
        pass
