"""Believes the folder's name, not what is in it.

caught by: save_checkpoint · resumed
"""

from solutions import production as right
from solutions.production import newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    right.save_checkpoint(folder, step, model, optimizer)


def load_checkpoint(path, model, optimizer):
    right.load_checkpoint(path, model, optimizer)
    return int(path.name.removeprefix("step_"))
