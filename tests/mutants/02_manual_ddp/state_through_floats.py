"""Packs the whole state into one float tensor, which rounds large integers.

caught by: broadcast_state · values
"""

import torch
import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def broadcast_state(module, group=None):
    tensors = [*module.parameters(), *module.buffers()]
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    dist.broadcast(flat, group=group, group_src=0)
    with torch.no_grad():
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))
