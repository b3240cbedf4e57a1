"""A name where a Path is promised.

caught by: newest_checkpoint · newest
"""

from solutions import checkpoints as right


def newest_checkpoint(folder):
    path = right.newest_checkpoint(folder)
    return path and str(path)
