"""Sends what state_dict holds, which leaves out buffers that are not persistent.

caught by: broadcast_state · values
"""

import torch.distributed as dist

from solutions import manual_ddp as right


def broadcast_state(module, group=None):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, group=group, group_src=0)


class ManualDDP(right.ManualDDP):
    pass
