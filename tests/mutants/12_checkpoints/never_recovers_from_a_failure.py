"""Keeps a future that has failed, so every later save fails, too.

caught by: BackgroundSaver · failure
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def wait(self):
        if self._pending is not None:
            future, folder, step = self._pending
            future.result()
            right.complete_checkpoint(folder, step)
            self._pending = None
