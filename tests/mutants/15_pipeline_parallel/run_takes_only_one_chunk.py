"""Knows only the first chunk of a stage.

caught by: Pipeline · schedules
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def position_of(self, action):
        return self.stage if self.last >= self.stages else super().position_of(action)
