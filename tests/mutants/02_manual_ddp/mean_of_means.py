"""Averages unequal shares as if they were equal.

caught by: average_gradients_weighted · values
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients_weighted(module, samples, group=None):
    right.average_gradients(module, group)
