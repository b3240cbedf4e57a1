"""Creates a group with the backend of training.

caught by: BackgroundSaver · own group
"""

import torch.distributed as dist

from solutions import checkpoints as right
from solutions.checkpoints import load_checkpoint, newest_checkpoint  # noqa: F401


class BackgroundSaver(right.BackgroundSaver):
    def __init__(self):
        self._group = dist.new_group()
        self._pending = None
