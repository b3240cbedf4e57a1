"""Removes the folder of the save in flight if the same step is saved again.

caught by: BackgroundSaver · one at a time
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def save(self, folder, step, model, optimizer):
        right.begin_checkpoint(folder, step)
        super().save(folder, step, model, optimizer)
