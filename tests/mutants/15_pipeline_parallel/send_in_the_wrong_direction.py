"""Sends outputs to the stage before.

caught by: Neighbors · ring
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def route(self, kind, sends=True):
        return super().route(kind, not sends)
