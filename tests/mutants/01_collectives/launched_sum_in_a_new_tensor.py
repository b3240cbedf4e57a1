"""Adds the received shards out of place, so the caller's flat tensor does not contain the sum.

caught by: launch_reduce_scatter · in place
"""

from solutions import async_collectives as right


class _OutOfPlace(right.DirectReduceScatter):
    def wait(self):
        self.in_flight.wait()
        return self.own + self.received.sum(dim=0)


def launch_reduce_scatter(flat, group=None):
    return _OutOfPlace(flat.view(right.dist.get_world_size(group), -1), group)
