"""Keeps the flat tensor for the next time.

caught by: TravellingGradients · memory
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def wait(self):
        kept = self.flat
        super().wait()
        self.kept = kept
