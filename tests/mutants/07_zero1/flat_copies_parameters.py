"""Copies parameters into flat, and leaves the model computing with the old ones.

caught by: FlatParameters · views
"""

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def _move_in(self):
        pass
