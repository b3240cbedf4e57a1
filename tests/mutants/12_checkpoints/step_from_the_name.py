"""Believes the folder's name, not what is in it.

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint, save_checkpoint  # noqa: F401


def load_checkpoint(path, model, optimizer):
    right.load_checkpoint(path, model, optimizer)
    return int(path.name.removeprefix("step_"))
