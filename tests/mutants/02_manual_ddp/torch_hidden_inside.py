"""Cheats by hiding torch's DistributedDataParallel in a list, where `modules()` does not find it.

caught by: ManualDDP · wire
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        self.module = module
        self.hidden = [DistributedDataParallel(module, process_group=group)]

    def forward(self, *inputs, **kwargs):
        return self.hidden[0](*inputs, **kwargs)

    def finish_gradient_sync(self):
        pass
