"""Cheats by deriving from torch's DistributedDataParallel.

caught by: ManualDDP · values
"""

from torch.nn.parallel import DistributedDataParallel


class ManualDDP(DistributedDataParallel):
    def __init__(self, module, group=None):
        super().__init__(module, process_group=group)

    def finish_gradient_sync(self):
        pass
