"""Skips a frozen parameter only if it has no gradient, and sends the one from before it was frozen.

caught by: average_gradients · wire
"""

import torch

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients(module, group=None):
    for parameter in module.parameters():
        if parameter.grad is None:
            if not parameter.requires_grad:
                continue
            parameter.grad = torch.zeros_like(parameter)
        right.mean_over_ranks_(parameter.grad, group)
