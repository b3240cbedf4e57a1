"""Sums only what it receives and omits the rank's own contribution.

caught by: launch_reduce_scatter · values
"""

from solutions import async_collectives as right


class _Others(right.DirectReduceScatter):
    def wait(self):
        self.in_flight.wait()
        return self.received.sum(0)


def launch_reduce_scatter(flat, group=None):
    return _Others(flat.view(right.dist.get_world_size(group), -1), group)
