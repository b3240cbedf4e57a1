"""Returns the sum instead of writing it into the caller's tensor.

caught by: ring_all_reduce · values
"""

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    gathered = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)
    tensor = gathered[: tensor.numel()].view(tensor.shape)
    return tensor
