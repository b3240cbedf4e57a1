"""Saves filling flat with zeros: the filling is whatever was there.

caught by: FlatParameters · layout
"""

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def new_flat(self):
        return super().new_flat().fill_(7)
