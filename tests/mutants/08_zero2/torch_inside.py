"""Cheats by using torch's DistributedDataParallel and ZeroRedundancyOptimizer.

caught by: ZeRO2 · values
"""

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class ZeRO2(nn.Module):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__()
        self.module, self.hidden = module, [DistributedDataParallel(module, process_group=group)]
        self.optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_cls, process_group=group, **defaults)

    def forward(self, *args, **kwargs):
        return self.hidden[0](*args, **kwargs)

    def finish_gradient_sync(self):
        pass

    def step(self):
        self.optimizer.step()
