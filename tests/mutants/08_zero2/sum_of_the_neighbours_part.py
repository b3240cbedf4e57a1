"""Counts parts from 1: each rank gets the sum that belongs to its neighbour.

caught by: begin_reduce_scatter · values
"""

from solutions import zero2 as right


def begin_reduce_scatter(flat, group=None):
    parts = flat.view(right.dist.get_world_size(group), -1)
    return right.begin_reduce_scatter(parts.roll(1, 0).flatten(), group)
