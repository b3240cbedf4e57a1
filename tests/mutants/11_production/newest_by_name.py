"""Compares names as text: step_9 comes after step_10.

caught by: save_checkpoint · newest
"""

from solutions import production as right
from solutions.production import load_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def newest_checkpoint(folder):
    return max((path for path in folder.glob("step_*") if path.name[5:].isdigit()), default=None)
