"""Cheats by calling torch's fully_shard.

caught by: ZeRO3 · everything
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class ZeRO3(torch.nn.Module):
    def __init__(self, module, units=None, compute_dtype=None, prefetch=1, reshard_after_forward=True, group=None):
        super().__init__()
        mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
        for each in (*module.blocks, module):
            fully_shard(each, mesh=mesh, reshard_after_forward=reshard_after_forward)
        self.module = module

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self):
        pass
