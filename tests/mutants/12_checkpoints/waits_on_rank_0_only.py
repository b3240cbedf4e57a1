"""Lets rank 0 rename the folder, and the other ranks return without waiting for it.

caught by: BackgroundSaver · all ranks wait
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def wait(self):
        if self._pending is not None:
            (future, folder, step), self._pending = self._pending, None
            future.result()
            if right.dist.get_rank() == 0:
                (folder / f"step_{step}.half").rename(folder / f"step_{step}")
