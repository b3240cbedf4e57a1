"""Saves when it is called, and training waits.

caught by: BackgroundSaver · background
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver:
    def save(self, folder, step, model, optimizer):
        right.save_checkpoint(folder, step, model, optimizer)

    def wait(self):
        pass
