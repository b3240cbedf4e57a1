"""Launches a message and keeps neither its handle nor its tensor.

caught by: Neighbors · in flight
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def send(self, kind, tensor):
        super().send(kind, tensor)
        dropped.extend(self.in_flight[kind])
        self.in_flight[kind].clear()


dropped = []
