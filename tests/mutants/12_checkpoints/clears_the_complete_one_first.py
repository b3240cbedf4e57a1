"""Deletes a complete checkpoint of the same step before the new one is written.

caught by: save_checkpoint · failure
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


def save_checkpoint(folder, step, model, optimizer):
    if right.dist.get_rank() == 0:
        right.shutil.rmtree(folder / f"step_{step}", ignore_errors=True)
    right.save_checkpoint(folder, step, model, optimizer)
