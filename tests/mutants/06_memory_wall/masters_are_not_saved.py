"""Keeps masters and momenta where state_dict() does not look.

caught by: MasterWeights · checkpoint
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def state_dict(self):
        return {**super().state_dict(), "state": {}}
