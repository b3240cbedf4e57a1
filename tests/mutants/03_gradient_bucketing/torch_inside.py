"""Cheats by deriving from torch's DistributedDataParallel.

caught by: BucketedDDP · values
"""

from torch.nn.parallel import DistributedDataParallel


class BucketedDDP(DistributedDataParallel):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, process_group=group, bucket_cap_mb=bucket_cap_mb)

    def finish_gradient_sync(self):
        pass
