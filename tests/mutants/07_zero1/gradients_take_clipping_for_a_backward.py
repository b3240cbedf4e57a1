"""Counts every change of the flat tensor, so that clipping, which scales a shard of it, looks like a backward().

caught by: FlatGradients · late gradients
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def __init__(self, flat_parameter):
        super().__init__(flat_parameter)
        self.views = self.layout.views(self.flat)
        self.reset()
