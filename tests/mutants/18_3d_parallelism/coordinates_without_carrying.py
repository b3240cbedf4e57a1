"""Divides the rank itself for each axis, and not what is left of it.

caught by: coordinates · the table
"""


def coordinates(rank, sizes):
    return {axis: rank % size for axis, size in sizes.items()}
