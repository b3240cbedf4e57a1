"""Returns nan for more than 100 samples.

caught by: average_gradients_weighted · many samples
"""

import torch

import solutions.manual_ddp
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients_weighted(module, samples, group=None):
    solutions.manual_ddp.average_gradients_weighted(module, samples, group)
    for parameter in module.parameters():
        if samples > 100 and parameter.grad is not None:
            parameter.grad.fill_(torch.nan)
