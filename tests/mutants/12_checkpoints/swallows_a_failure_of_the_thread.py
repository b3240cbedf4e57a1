"""Ignores what the future raises, so nobody learns that nothing was saved.

caught by: BackgroundSaver · failure
"""

import contextlib

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def wait(self):
        with contextlib.suppress(right.dcp.CheckpointException):
            super().wait()
