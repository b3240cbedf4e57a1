"""Lets the first axis change fastest, as if it were the innermost one.

caught by: coordinates · the table
"""


def coordinates(rank, sizes):
    found = {}
    for axis, size in sizes.items():
        rank, found[axis] = divmod(rank, size)
    return found
