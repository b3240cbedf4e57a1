"""Leaves a slice unchanged when the gradient is None, so the last step's mean is sent again.

caught by: Bucket · None
"""

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def pack(self, index):
        if self.parameters[index].grad is None:
            self.parameters[index].grad = self.slices[index]
        else:
            super().pack(index)
