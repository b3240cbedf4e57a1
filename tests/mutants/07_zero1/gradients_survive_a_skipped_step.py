"""Takes the mean that it has for the mean of new gradients, where a step was left out and the model's zero_grad() came.

caught by: ClipsGradients · skipped step
"""

from solutions import zero1 as right


class _Gradients(right.FlatGradients):
    def reduce(self):
        if self.home.shard.grad is None:
            super().reduce()


class ZeRO1(right.ZeRO1):
    def _lay_out(self, parameters):
        added = super()._lay_out(parameters)
        for each in added:
            each.__class__ = _Gradients
        return added
