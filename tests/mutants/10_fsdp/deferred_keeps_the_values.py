"""Keeps the values of all parameters that it has drawn.

caught by: Materializer · memory
"""

from solutions import deferred as right


class Materializer(right.Materializer):
    def value_of(self, tensor):
        self.values = [*getattr(self, "values", ()), super().value_of(tensor)]
        return self.values[-1]
