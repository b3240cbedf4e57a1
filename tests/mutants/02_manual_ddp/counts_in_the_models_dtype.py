"""Adds up the numbers of samples in the dtype of the first parameter, which may be bf16.

caught by: average_gradients_weighted · many samples
"""

import torch
import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients_weighted(module, samples, group=None):
    first = next(module.parameters())
    total = torch.tensor([samples], dtype=first.dtype, device=first.device)
    dist.all_reduce(total, group=group)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad *= samples / total.item()
            dist.all_reduce(parameter.grad, group=group)
