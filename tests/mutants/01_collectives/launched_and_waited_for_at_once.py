"""Waits at launch, so nothing can be computed in the meantime.

caught by: launch_reduce_scatter · at once
"""

from solutions import async_collectives as right


class _Waiting(right.DirectReduceScatter):
    def __init__(self, shards, group):
        super().__init__(shards, group)
        self.in_flight.wait()


def launch_reduce_scatter(flat, group=None):
    return _Waiting(flat.view(right.dist.get_world_size(group), -1), group)
