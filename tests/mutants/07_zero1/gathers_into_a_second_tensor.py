"""Collects parameters into a new flat tensor, and copies them back: a whole copy in every step.

caught by: ShardedOptimizer · memory
"""

from shared.c10d import all_gather_single
from solutions import zero1 as right


class _Home(right.FlatParameters):
    def gather(self):
        arrived = self.new_flat()
        handle = all_gather_single(arrived, self.shard.detach(), group=self.group, async_op=True)
        handle.wait()
        self.flat.copy_(arrived)
        return handle


class ZeRO1(right.ZeRO1):
    def _lay_out(self, parameters):
        added = super()._lay_out(parameters)
        for each in added:
            each.home.__class__ = _Home
        return added
