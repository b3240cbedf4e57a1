"""Calls the closure but does not return its value.

caught by: MasterWeights · closure
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step(self, closure=None):
        super().step(closure)
