"""Takes the mean of the copies' gradients.

caught by: Pipeline · tied GPT
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def sum_tied_gradients(self):
        super().sum_tied_gradients()
        for parameter, stages in self.tied:
            parameter.grad /= len(stages)
