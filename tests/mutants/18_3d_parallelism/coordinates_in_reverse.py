"""Returns the axes from the innermost to the outermost.

caught by: coordinates · the table
"""


def coordinates(rank, sizes):
    found = {}
    for axis, size in reversed(sizes.items()):
        rank, found[axis] = divmod(rank, size)
    return found
