"""Blocks in launch(), so nothing can run in the meantime.

caught by: Bucket · waits
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def launch(self):
        dist.all_reduce(self.flat, group=self.group)

    def wait(self):
        pass
