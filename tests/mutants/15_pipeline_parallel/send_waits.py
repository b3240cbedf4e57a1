"""Waits in send() until the message has been received.

caught by: Neighbors · at once
"""

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def send(self, kind, tensor):
        super().send(kind, tensor)
        if self.in_flight[kind]:
            self.in_flight[kind][-1][0].wait()
