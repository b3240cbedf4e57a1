"""Ignores the group.

caught by: sum_over_ranks · group
"""

from solutions import tensor_parallel as right


def sum_over_ranks(partial, group=None):
    return right.sum_over_ranks(partial)
