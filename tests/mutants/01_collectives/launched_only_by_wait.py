"""Launches nothing until `wait()` is called, so nothing is in flight while the caller computes.

caught by: launch_reduce_scatter · at once
"""

from solutions import async_collectives as right


class _Postponed:
    def __init__(self, shards, group):
        self.arguments = shards, group

    def wait(self):
        return right.DirectReduceScatter(*self.arguments).wait()


def launch_reduce_scatter(flat, group=None):
    return _Postponed(flat.view(right.dist.get_world_size(group), -1), group)
