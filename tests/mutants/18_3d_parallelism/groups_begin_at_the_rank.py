"""Lists a group from the rank on, and then from its beginning.

caught by: ranks_along · the table's groups
"""

from solutions import layouts


def ranks_along(axis, rank, sizes):
    group = layouts.ranks_along(axis, rank, sizes)
    index = group.index(rank)
    return group[index:] + group[:index]
