"""Renames the folder in wait() without waiting for the thread.

caught by: BackgroundSaver · not early
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def wait(self):
        if self._pending is not None:
            (_, folder, step), self._pending = self._pending, None
            right.complete_checkpoint(folder, step)
