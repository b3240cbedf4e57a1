"""Waits before it comes back: nothing can be computed meanwhile.

caught by: begin_reduce_scatter · at once
"""

from solutions import zero2 as right


def begin_reduce_scatter(flat, group=None):
    part = right.begin_reduce_scatter(flat, group)()
    return lambda: part
