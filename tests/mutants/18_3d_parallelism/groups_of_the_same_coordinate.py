"""Collects the ranks that have the same coordinate on the axis.

caught by: ranks_along · the table's groups
"""

import math

from solutions.layouts import coordinates


def ranks_along(axis, rank, sizes):
    own = coordinates(rank, sizes)[axis]
    return [each for each in range(math.prod(sizes.values())) if coordinates(each, sizes)[axis] == own]
