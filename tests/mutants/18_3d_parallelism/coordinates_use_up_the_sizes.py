"""Takes the axes out of the caller's dictionary.

caught by: coordinates · the table
"""


def coordinates(rank, sizes):
    found, order = {}, list(sizes)
    while sizes:
        axis, size = sizes.popitem()
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in order}
