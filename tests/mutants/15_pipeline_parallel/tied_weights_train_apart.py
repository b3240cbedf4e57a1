"""Never exchanges the gradients of tied weights.

caught by: Pipeline · tied GPT
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def sum_tied_gradients(self):
        pass
