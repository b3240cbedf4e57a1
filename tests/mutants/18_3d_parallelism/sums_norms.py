"""Adds up the ranks' norms instead of their squares.

caught by: gradient_norm · plain model
"""

import torch
import torch.distributed as dist


def gradient_norm(module, group=None):
    total = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    for parameter in module.parameters():
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum()
    total = total.sqrt()
    dist.all_reduce(total, group=group)
    return total
