"""Detaches a gradient that is part of a graph, and says nothing.

caught by: TravellingGradients · refusals
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def pack(self, place):
        parameter = self.parameters[place]
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()
        super().pack(place)
