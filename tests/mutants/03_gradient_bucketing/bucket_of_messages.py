"""Launches one all-reduce per slice instead of one per bucket.

caught by: Bucket · wire
"""

import torch.distributed as dist

from solutions import bucketed_ddp as right


class Bucket(right.Bucket):
    def launch(self):
        self.handles = [dist.all_reduce(piece, group=self.group, async_op=True) for piece in self.slices]

    def wait(self):
        for handle in self.handles:
            handle.wait()
