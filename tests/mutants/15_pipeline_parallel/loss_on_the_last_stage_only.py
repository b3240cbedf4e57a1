"""Returns the loss on the last stage only.

caught by: Pipeline · plain model
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def step(self, inputs, targets):
        loss = super().step(inputs, targets)
        return loss if self.stage == self.stages - 1 else 0 * loss
