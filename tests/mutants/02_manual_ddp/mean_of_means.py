"""Averages the ranks' gradients with equal weights, although the ranks have different numbers of samples.

caught by: average_gradients_weighted · values
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients_weighted(module, samples, group=None):
    right.average_gradients(module, group)
