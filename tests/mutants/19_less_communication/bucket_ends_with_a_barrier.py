"""Waits for all ranks after its last collective.

caught by: CompressedBucket · unsent
"""

import torch.distributed as dist

from solutions import compression as right


class CompressedBucket(right.CompressedBucket):
    def wait(self):
        super().wait()
        dist.barrier(self.group)
