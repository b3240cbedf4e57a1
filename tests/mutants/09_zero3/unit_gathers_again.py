"""All-gathers parameters that are already unsharded.

caught by: Unit · flat parameters
"""

from solutions import units as right


class Unit(right.Unit):
    def unshard(self):
        self.works = [flat_parameter.unshard() for flat_parameter in self.flat_parameters]
        if self.state is right.UnitState.SHARDED:
            self.state = right.UnitState.UNSHARDING
