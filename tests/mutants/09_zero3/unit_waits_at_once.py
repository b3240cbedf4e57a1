"""Launches the all-gathers and waits for them at once.

caught by: Unit · flat parameters
"""

from solutions import units as right


class Unit(right.Unit):
    def unshard(self):
        super().unshard()
        for work in self.works:
            work.wait()
