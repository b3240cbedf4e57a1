"""Computes the losses, but does not append them to self.losses.

caught by: Pipeline · plain model
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def run(self, action, inputs, targets):
        super().run(action, inputs, targets)
        self.losses.clear()
