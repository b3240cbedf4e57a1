"""Computes zeros from the parameter, so autograd records the gradient.

caught by: average_gradients · unused on one rank
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients(module, group=None):
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = parameter * 0
            right.mean_over_ranks_(parameter.grad, group)
