"""Broadcasts from global rank 0, which may not be in the group.

caught by: broadcast_state · group
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def broadcast_state(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0, group=group)
