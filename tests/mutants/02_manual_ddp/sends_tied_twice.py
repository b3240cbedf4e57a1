"""Averages a tied parameter once per name: the values are right, but the bytes are sent twice.

caught by: average_gradients · wire
"""

import torch

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients(module, group=None):
    for _, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            right.mean_over_ranks_(parameter.grad, group)
