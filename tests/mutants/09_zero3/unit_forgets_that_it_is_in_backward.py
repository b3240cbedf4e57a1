"""A wait in backward makes it a forward.

caught by: Unit · states
"""

from solutions import zero3 as right


class Unit(right.Unit):
    def wait(self):
        super().wait()
        self.state = right.UnitState.GATHERED
