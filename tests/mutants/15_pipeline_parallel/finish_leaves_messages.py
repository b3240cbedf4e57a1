"""Waits for the messages in flight, but keeps them.

caught by: Neighbors · plain messages
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def finish(self):
        for messages in self.in_flight.values():
            for work, _ in messages:
                work.wait()
