"""Adds gradients up, and never divides.

caught by: TravellingGradients · values
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def pack(self, place):
        gradient = self.parameters[place].grad
        if gradient is not None:
            gradient *= right.dist.get_world_size(self.home.group)
        super().pack(place)
