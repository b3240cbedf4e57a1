"""Moves the last axis to the place of the chosen one.

caught by: ranks_along · along an axis
"""

import math

import torch

from shared.placements import Placement, Placements, Shard


def ranks_along(sizes: tuple[int, ...], axis: int) -> list[list[int]]:
    grid = torch.arange(math.prod(sizes)).view(sizes)
    return grid.movedim(-1, axis).reshape(-1, sizes[axis]).tolist()


def may_change(placements: Placements, axis: int, after: Placement) -> bool:
    touched = [each for each in (placements[axis], after) if isinstance(each, Shard)]
    return not any(later in touched for later in placements[axis + 1 :])
