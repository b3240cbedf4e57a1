"""Broadcasts from global rank 0, which a group need not hold.

caught by: broadcast_state · group
"""

import torch.distributed as dist

from solutions import manual_ddp as right


def broadcast_state(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0, group=group)


class ManualDDP(right.ManualDDP):
    pass
