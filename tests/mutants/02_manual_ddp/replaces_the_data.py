"""Receives into new tensors and replaces those of the module by them.

caught by: broadcast_state · values
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def broadcast_state(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        received = tensor.detach().clone()
        dist.broadcast(received, group=group, group_src=0)
        tensor.data = received
