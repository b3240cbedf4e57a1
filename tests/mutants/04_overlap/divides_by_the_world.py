"""Divides by the world size even if the group is smaller.

caught by: OverlappedDDP · group
"""

import torch.distributed as dist

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.group = group

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for bucket in self.buckets:
            bucket.flat *= dist.get_world_size(self.group) / dist.get_world_size()
