"""Compares every micro-batch with the targets of the first.

caught by: Pipeline · plain model
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def run(self, action, inputs, targets):
        super().run(action, inputs, [targets[0]] * len(targets))
