"""Takes every axis to be as long as the one inside it.

caught by: coordinates · meshes
"""


def coordinates(rank, sizes):
    found = {}
    for index, (axis, size) in enumerate(reversed(sizes.items())):
        found[axis] = rank // size**index % size
    return {axis: found[axis] for axis in sizes}
