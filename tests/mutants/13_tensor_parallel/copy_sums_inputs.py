"""Exchanges the two operators.

caught by: copy_to_ranks · plain gradient
"""

from solutions import tensor_parallel as right


def copy_to_ranks(x, group=None):
    return right.sum_over_ranks(x, group)
