"""Leaves the rank itself out of its group.

caught by: ranks_along · the table's groups
"""

from solutions import layouts


def ranks_along(axis, rank, sizes):
    return [each for each in layouts.ranks_along(axis, rank, sizes) if each != rank]
