"""Launches without looking at the bucket before: all may be alive at once.

caught by: TravellingGradients · before
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def launch(self):
        self.finish = right.begin_reduce_scatter(self.flat, self.home.group)
