"""Divides by the number of ranks, although the caller asks for the sum.

caught by: launch_reduce_scatter · values
"""

from solutions import async_collectives as right


class _Mean(right.DirectReduceScatter):
    def wait(self):
        return super().wait() / (1 + len(self.received))


def launch_reduce_scatter(flat, group=None):
    return _Mean(flat.view(right.dist.get_world_size(group), -1), group)
