"""Removes the axis from the caller's dictionary.

caught by: ranks_along · the table's groups
"""

from solutions import layouts


def ranks_along(axis, rank, sizes):
    found = layouts.ranks_along(axis, rank, sizes)
    del sizes[axis]
    return found
