"""Always returns step 0.

caught by: load_checkpoint · resumed
"""

from solutions import checkpoints as right
from solutions.checkpoints import newest_checkpoint, save_checkpoint  # noqa: F401


def load_checkpoint(path, model, optimizer):
    right.load_checkpoint(path, model, optimizer)
    return 0
