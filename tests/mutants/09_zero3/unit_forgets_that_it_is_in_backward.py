"""Overwrites the state BACKWARD in wait_for_unshard().

caught by: Unit · states
"""

from solutions import units as right


class Unit(right.Unit):
    def wait_for_unshard(self):
        super().wait_for_unshard()
        self.state = right.UnitState.UNSHARDED
