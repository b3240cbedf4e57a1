"""Keeps its flat tensor, where the last gradient still lies when there is None this time.

caught by: TravellingGradients · values
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    kept = None

    def pack(self, place):
        if self.flat is None and self.kept is not None:
            self.flat, self.slices = self.kept
        super().pack(place)
        self.kept = self.flat, self.slices
