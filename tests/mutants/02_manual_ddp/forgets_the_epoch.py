"""Takes set_epoch and shuffles every epoch alike.

caught by: ShardedSampler · epochs
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def set_epoch(self, epoch):
        pass
