"""Sees what backward() adds to the views, but not a gradient that it has put beside them.

caught by: FlatGradients · late gradients
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def is_reduced(self):
        if self.flat_parameter.shard.grad is None or not self.holds_gradients():
            return False
        if self.views[0]._version != self.reduced_version:
            raise RuntimeError("backward() has run after the gradients were reduced")
        return True
