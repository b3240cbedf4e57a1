"""Frees memory into which messages still arrive.

caught by: Unit · parts
"""

from solutions import zero3 as right


class Unit(right.Unit):
    def reshard(self):
        for part in self.parts:
            part.free()
        self.state = right.UnitState.SHARDED
