"""Makes its flat tensor with the first gradient that is not None: where there is none, there is nothing to send.

caught by: TravellingGradients · values
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def pack(self, place):
        if self.parameters[place].grad is not None:
            super().pack(place)
