"""Leaves a slice unchanged when the gradient is None, so the last step's mean is sent again.

caught by: Bucket · None
"""

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def pack(self, place):
        if self.parameters[place].grad is None:
            self.parameters[place].grad = self.slices[place]
        else:
            super().pack(place)
