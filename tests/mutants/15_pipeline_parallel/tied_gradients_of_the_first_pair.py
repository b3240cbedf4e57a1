"""Adds up the gradients of only one parameter, although a stage may share several.

caught by: Pipeline · many ties
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def sum_tied_gradients(self):
        every, self.tied = self.tied, self.tied[:1]
        super().sum_tied_gradients()
        self.tied = every
