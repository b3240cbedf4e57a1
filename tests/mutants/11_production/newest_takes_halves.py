"""Reads the number and not what is behind it.

caught by: save_checkpoint · newest
"""

from solutions import production as right
from solutions.production import load_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def newest_checkpoint(folder):
    found = [path for path in folder.glob("step_*") if path.name[5:].split(".")[0].isdigit()]
    return max(found, key=lambda path: int(path.name[5:].split(".")[0]), default=None)
