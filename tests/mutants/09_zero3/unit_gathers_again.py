"""Gathers what is here already.

caught by: Unit · parts
"""

from solutions import zero3 as right


class Unit(right.Unit):
    def begin_gather(self):
        self.handles = [part.gather() for part in self.parts]
        if self.state is right.UnitState.SHARDED:
            self.state = right.UnitState.GATHERING
