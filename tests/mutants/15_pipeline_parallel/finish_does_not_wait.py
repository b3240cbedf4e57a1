"""Forgets the messages in flight without waiting for them.

caught by: Neighbors · finish
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def finish(self):
        for messages in self.in_flight.values():
            dropped.extend(messages)
            messages.clear()


dropped = []
