"""Sends the gradient of the input twice as large as it is, in float64 pairs.

caught by: Pipeline · plain model
"""

from solutions import pipeline as right


class Pipeline(right.Pipeline):
    def run(self, action, inputs, targets):
        if action.kind == "B" and self.position_of(action):
            send = self.neighbors.send
            self.neighbors.send = lambda kind, tensor: send(kind, 2 * tensor)
            super().run(action, inputs, targets)
            self.neighbors.send = send
        else:
            super().run(action, inputs, targets)
