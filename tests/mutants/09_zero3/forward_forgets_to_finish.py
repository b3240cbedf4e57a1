"""A forward does not mind what is under way.

caught by: ReducesGradients · accumulation
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    @property
    def pending(self):
        return False

    @pending.setter
    def pending(self, value):
        pass
