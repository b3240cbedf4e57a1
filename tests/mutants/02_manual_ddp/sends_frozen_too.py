"""Creates zero gradients for frozen parameters and averages them too.

caught by: average_gradients · wire
"""

import torch

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients(module, group=None):
    for parameter in module.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        right.mean_over_ranks_(gradient, group)
        if parameter.requires_grad:
            parameter.grad = gradient
