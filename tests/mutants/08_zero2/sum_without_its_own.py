"""Adds up what arrives, and forgets what this rank has itself.

caught by: begin_reduce_scatter · values
"""

from solutions import zero2 as right


def begin_reduce_scatter(flat, group=None):
    rank, size = right.dist.get_rank(group), right.dist.get_world_size(group)
    flat.view(size, -1)[rank].zero_()
    return right.begin_reduce_scatter(flat, group)
