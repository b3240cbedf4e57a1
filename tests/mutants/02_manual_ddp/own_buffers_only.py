"""Broadcasts the module's own buffers but not those of its submodules.

caught by: broadcast_state · values
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def broadcast_state(module, group=None):
    for tensor in [*module.parameters(), *module._buffers.values()]:
        if tensor is not None:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
