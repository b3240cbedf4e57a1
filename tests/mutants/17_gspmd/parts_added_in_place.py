"""Adds the other terms to the first one in place.

caught by: local_part · more ranks
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.placements import Partial, Placement, Shard


def local_part(tensor: Tensor, placement: Placement, index: int, size: int) -> Tensor:
    if isinstance(placement, Shard):
        length = tensor.shape[placement.dim]
        if length % size:
            raise ValueError(f"{placement}: {length} elements cannot be divided equally among {size} ranks")
        return tensor.chunk(size, placement.dim)[index].contiguous()
    if isinstance(placement, Partial) and index > 0:
        return torch.zeros_like(tensor)
    return tensor


def whole_from(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    if isinstance(placement, Partial):
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total
    return parts[0]
