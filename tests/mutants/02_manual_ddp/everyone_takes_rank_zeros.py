"""Broadcasts rank 0's gradients instead of averaging: the ranks agree, but the other ranks' samples are lost.

caught by: average_gradients · plain model
"""

import torch
import torch.distributed as dist

from solutions import manual_ddp as right


def average_gradients(module, group=None):
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, group=group, group_src=0)


class ManualDDP(right.ManualDDP):
    def finish_gradient_sync(self):
        average_gradients(self.module, self.group)
