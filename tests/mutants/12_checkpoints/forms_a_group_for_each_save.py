"""Forms a new process group for each save, and never destroys one.

caught by: BackgroundSaver · own group
"""

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def save(self, folder, step, model, optimizer):
        self._group = right.dist.new_group(backend="gloo")
        super().save(folder, step, model, optimizer)
