"""Averages the gradients of weight matrices only, not those of biases.

caught by: average_gradients · values
"""

import torch

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients(module, group=None):
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            right.mean_over_ranks_(parameter.grad, group)
