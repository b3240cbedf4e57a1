"""Takes set_epoch and shuffles every epoch alike.

caught by: ShardedSampler · epochs
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    pass


class ShardedSampler(right.ShardedSampler):
    def set_epoch(self, epoch):
        pass
