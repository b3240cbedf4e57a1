"""Waits for each part before the next one travels.

caught by: Unit · parts
"""

from solutions import zero3 as right


class Unit(right.Unit):
    def wait(self):
        if self.state is right.UnitState.SHARDED:
            for part in self.parts:
                part.gather().wait()
            self.state = right.UnitState.GATHERED
        super().wait()
