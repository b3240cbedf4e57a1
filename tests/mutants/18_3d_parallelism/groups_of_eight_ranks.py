"""Searches the first eight ranks only.

caught by: ranks_along · groups
"""

from solutions import layouts


def ranks_along(axis, rank, sizes):
    return [each for each in layouts.ranks_along(axis, rank, sizes) if each < 8]
