"""Divides already here, and again where the mean is asked for.

caught by: begin_reduce_scatter · values
"""

from solutions import zero2 as right


def begin_reduce_scatter(flat, group=None):
    finish = right.begin_reduce_scatter(flat, group)
    return lambda: finish() / right.dist.get_world_size(group)
