"""Adds up in float32.

caught by: sum_over_ranks · plain sum
"""

from solutions import tensor_parallel as right


def sum_over_ranks(partial, group=None):
    return right.sum_over_ranks(partial.float(), group).to(partial.dtype)
