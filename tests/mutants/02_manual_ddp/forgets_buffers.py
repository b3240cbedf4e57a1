"""Broadcasts the parameters but not the buffers.

caught by: broadcast_state · values
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def broadcast_state(module, group=None):
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), group=group, group_src=0)
