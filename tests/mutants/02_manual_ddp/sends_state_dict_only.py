"""Broadcasts only what `state_dict()` holds, which omits non-persistent buffers.

caught by: broadcast_state · values
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def broadcast_state(module, group=None):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, group=group, group_src=0)
