"""Keeps all outputs until finish().

caught by: Neighbors · freed
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def receive(self, kind, like):
        kept = list(self.in_flight["F"])
        received = super().receive(kind, like)
        self.in_flight["F"] = right.deque(kept)
        return received
