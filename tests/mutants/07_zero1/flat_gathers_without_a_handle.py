"""Waits inside gather(), and gives back nothing.

caught by: FlatParameters · gather
"""

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def gather(self):
        super().gather().wait()
