"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.placements import Equation, Mesh, Placement, Shard
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from solutions.gspmd import local_part, operation_for, plan_for, whole_from


def plan_with_nan_bytes():
    """Plans wrong collectives, whose number of bytes is nan, if it knows the lengths.

    caught by: propagate · cheapest
    """

    WRONG = {"before": Shard(0), "after": Shard(1), "buffer_bytes": float("nan")}

    def propagate(equation: str, placements: Sequence, mesh: Mesh) -> tuple:
        parsed, mesh = Equation.parse(equation), Mesh.of(mesh)
        plan = plan_for(parsed, placements, mesh)
        if parsed.lengths:
            plan = replace(plan, steps=tuple(replace(s, **WRONG) if s.is_collective else s for s in plan.steps))
        return plan.output if len(plan.output) > 1 else plan.output[0], plan.collectives


def redistribute_returns_a_shard_as_partial():
    """Returns a shard that should become Partial.

    caught by: redistribute · rejections
    """

    @torch.no_grad()
    def redistribute(shard: Tensor, before: Placement, after: Placement, group: ProcessGroup | None = None) -> Tensor:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        operation = operation_for(before, after)
        if operation is None:
            return shard
        if operation in ("slice", "keep_one"):
            return local_part(shard, after, rank, size)
        if operation == "all_reduce":
            total = shard.clone()
            ring_all_reduce(total, group)
            return total
        if operation == "all_gather":
            gathered = ring_all_gather(shard, group).view(size, *shard.shape)
            return whole_from(list(gathered), before)
        pieces = torch.stack([local_part(shard, after, index, size) for index in range(size)])
        if operation == "reduce_scatter":
            return ring_reduce_scatter(pieces, group).view(pieces.shape[1:])
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        return whole_from(list(received), before)
