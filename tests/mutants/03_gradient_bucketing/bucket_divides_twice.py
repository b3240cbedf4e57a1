"""Divides when it packs and again after the all-reduce.

caught by: Bucket · values
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def wait(self):
        super().wait()
        self.flat /= dist.get_world_size(self.group)
