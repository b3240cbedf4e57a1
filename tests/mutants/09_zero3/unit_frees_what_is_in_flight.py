"""Frees memory that an all-gather is still filling.

caught by: Unit · flat parameters
"""

from solutions import units as right


class Unit(right.Unit):
    def reshard(self):
        for flat_parameter in self.flat_parameters:
            flat_parameter.reshard()
        self.state = right.UnitState.SHARDED
