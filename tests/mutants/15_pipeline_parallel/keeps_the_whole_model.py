"""Keeps the layers of all stages.

caught by: Pipeline · memory
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def __init__(self, layers, *args, **kwargs):
        super().__init__(layers, *args, **kwargs)
        self.whole = layers
