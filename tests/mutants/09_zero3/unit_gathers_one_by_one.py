"""Waits for each flat parameter before it launches the next.

caught by: Unit · flat parameters
"""

from solutions import units as right


class Unit(right.Unit):
    def wait_for_unshard(self):
        if self.state is right.UnitState.SHARDED:
            for flat_parameter in self.flat_parameters:
                flat_parameter.unshard().wait()
            self.state = right.UnitState.UNSHARDED
        super().wait_for_unshard()
