"""Returns early on a rank without samples, so the other ranks wait forever.

caught by: average_gradients_weighted · values
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


def average_gradients_weighted(module, samples, group=None):
    if samples > 0:
        right.average_gradients_weighted(module, samples, group)
