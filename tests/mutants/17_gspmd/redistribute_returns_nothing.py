"""Returns what the all-reduce returns: nothing.

caught by: redistribute · plain changes
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.placements import Placement
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from solutions.gspmd import local_part, operation_for, whole_from


@torch.no_grad()
def redistribute(shard: Tensor, before: Placement, after: Placement, group: ProcessGroup | None = None) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if before == after:
        return shard
    operation = operation_for(before, after)
    if operation is None:
        raise ValueError(f"no single operation turns {before} into {after}")
    if operation in ("slice", "keep_one"):
        return local_part(shard, after, rank, size)
    if operation == "all_reduce":
        return ring_all_reduce(shard.clone(), group)
    if operation == "all_gather":
        gathered = ring_all_gather(shard, group).view(size, *shard.shape)
        return whole_from(list(gathered), before)
    pieces = torch.stack([local_part(shard, after, index, size) for index in range(size)])
    if operation == "reduce_scatter":
        return ring_reduce_scatter(pieces, group).view(pieces.shape[1:])
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return whole_from(list(received), before)
