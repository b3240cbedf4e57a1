"""Copies the gradient, and leaves it where it was.

caught by: TravellingGradients · values
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def pack(self, place):
        before = self.parameters[place].grad
        super().pack(place)
        self.parameters[place].grad = before
