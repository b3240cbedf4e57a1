"""Broadcasts the module's own buffers, and not its children's.

caught by: broadcast_state · values
"""

import torch.distributed as dist

from solutions import manual_ddp as right


def broadcast_state(module, group=None):
    for tensor in [*module.parameters(), *module._buffers.values()]:
        if tensor is not None:
            dist.broadcast(tensor.detach(), group=group, group_src=0)


class ManualDDP(right.ManualDDP):
    pass
