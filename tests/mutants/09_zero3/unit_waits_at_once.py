"""Begins to gather, and waits for it.

caught by: Unit · parts
"""

from solutions import zero3 as right


class Unit(right.Unit):
    def begin_gather(self):
        super().begin_gather()
        for handle in self.handles:
            handle.wait()
