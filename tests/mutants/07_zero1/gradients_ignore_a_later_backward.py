"""Returns from reduce() although backward() has added to the views since then: those gradients are lost.

caught by: FlatGradients · late gradients
"""

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def is_reduced(self):
        return self.flat_parameter.shard.grad is not None and self.holds_gradients()
