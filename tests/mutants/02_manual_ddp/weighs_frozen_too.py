"""Sends zeros for frozen parameters, and then drops the result.

caught by: average_gradients_weighted · wire
"""

import torch
import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients_weighted(module, samples, group=None):
    total = torch.tensor([samples], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    for parameter in module.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient *= samples / total.item()
        dist.all_reduce(gradient, group=group)
        if parameter.requires_grad:
            parameter.grad = gradient
