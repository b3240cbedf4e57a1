"""A name where a Path is promised.

caught by: save_checkpoint · newest
"""

from solutions import production as right
from solutions.production import load_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def newest_checkpoint(folder):
    path = right.newest_checkpoint(folder)
    return path and str(path)
