"""Receives into the tensor that only shows the shape.

caught by: Neighbors · plain messages
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def receive(self, kind, like):
        return like.copy_(super().receive(kind, like))
