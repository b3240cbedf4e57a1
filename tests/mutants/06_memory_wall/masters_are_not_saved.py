"""Leaves the masters and momenta out of state_dict().

caught by: MasterWeights · checkpoint
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def state_dict(self):
        return {**super().state_dict(), "state": {}}
