"""Divides by the number of micro-batches twice.

caught by: Pipeline · plain model
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def loss_of(self, target):
        return lambda output: self.loss_fn(output, target) / self.micro_batches**2
