"""Puts the mean where the last one was, and does not add it.

caught by: TravellingGradients · values
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def wait(self):
        if self.finish is not None:
            self.home.shard.grad = None
        super().wait()
