"""Ignores the group.

caught by: copy_to_ranks · group
"""

from solutions import tensor_parallel as right


def copy_to_ranks(x, group=None):
    return right.copy_to_ranks(x)
