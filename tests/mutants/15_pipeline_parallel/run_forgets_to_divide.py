"""Does not divide the loss by the number of micro-batches.

caught by: Pipeline · plain model
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def loss_of(self, target):
        return lambda output: self.loss_fn(output, target)
