"""What an earlier forward has gathered is computed with after loading.

caught by: ZeRO3 · another world size
"""

from solutions import zero3 as right


class _Stays:
    def __init__(self, units):
        self.units = units

    def values(self):
        return []


class ZeRO3(right.ZeRO3):
    def load_full_state_dict(self, state_dict):
        units, self.units = self.units, _Stays(self.units)
        super().load_full_state_dict(state_dict)
        self.units = units
