"""Lets an axis change inside the shards of another one.

caught by: ranks_along · one axis alone
"""

import math

import torch

from shared.placements import Placement, Placements


def ranks_along(sizes: tuple[int, ...], axis: int) -> list[list[int]]:
    grid = torch.arange(math.prod(sizes)).view(sizes)
    return grid.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()


def may_change(placements: Placements, axis: int, after: Placement) -> bool:
    return True
