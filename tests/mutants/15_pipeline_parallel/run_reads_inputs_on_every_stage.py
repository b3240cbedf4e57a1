"""Reads the batch on every stage, instead of what has arrived.

caught by: Pipeline · plain model
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def input_of(self, action):
        arrived = super().input_of(action)
        return arrived if self.inputs is None else self.inputs[action.micro_batch].view_as(arrived)

    def run(self, action, inputs, targets):
        self.inputs = inputs
        super().run(action, inputs, targets)
