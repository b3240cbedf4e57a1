"""Returns a function instead of a handle with a `wait()` method.

caught by: launch_reduce_scatter · values
"""

from solutions import async_collectives as right


def launch_reduce_scatter(flat, group=None):
    return right.launch_reduce_scatter(flat, group).wait
