"""What fully_shard makes of a model: each parameter is split by its rows, over the ranks that share a copy.

Rows are filled up to a multiple of those ranks where they travel, not where they are kept.
"""

from dataclasses import dataclass

import torch

from shared.checks.engine.framework import Wrong
from shared.checks.engine.sharded.unit_layout import owners
from shared.checks.engine.sharded.unit_training import UnitPlan
from shared.checks.models import unit_models


@dataclass(frozen=True)
class Unit:
    """A unit's numbers: as they are, and filled up."""

    numbers: int
    filled: int


def units_of(plan: UnitPlan, shard_ranks: int) -> list[Unit]:
    """List the units of a model, the root last."""
    module = unit_models.build(plan.model, 0, plan.dtype)
    owned = owners(module, unit_models.units_of(plan.model, module)).values()
    return [Unit(sum(p.numel() for p in each), sum(filled(p, shard_ranks) for p in each)) for each in owned]


def filled(parameter: torch.Tensor, shard_ranks: int) -> int:
    rows = parameter.shape[0]
    return -(-rows // shard_ranks) * shard_ranks * (parameter.numel() // rows)


def judge_parts(plan: UnitPlan, parts: list[dict], copies: int) -> None:
    """parts: of each rank, by the parameter's name.

    Raises: Wrong unless each parameter is a DTensor of which each rank has its rows, and every row is somewhere.
    """
    shard_ranks = len(parts) // copies
    for name, parameter in unit_models.build(plan.model, 0, plan.dtype).named_parameters():
        held = [own[name] for own in parts]
        most = filled(parameter, shard_ranks) // shard_ranks * parameter.itemsize
        for rank, part in enumerate(held):
            if part.dim is None:
                raise Wrong({rank: f"{plan}: {name} is not sharded"}, "Look at: which call shards this parameter?")
            if part.local.dtype != parameter.dtype:
                said = f"{plan}: {name} is kept in {part.local.dtype}, expected {parameter.dtype}"
                raise Wrong({rank: said}, "Look at: in which dtype is a shard kept?")
            if part.local.nbytes > most:
                said = f"{plan}: {part.local.nbytes:,} bytes of {name} are held; expected at most {most:,}"
                raise Wrong({rank: said}, "Look at: over which ranks is it split?")
        in_all = sum(part.local.nbytes for part in held)
        if in_all != copies * parameter.nbytes:
            evidence = f"{plan}: all ranks together hold {in_all:,} bytes of {name}"
            expected = f"expected {copies * parameter.nbytes:,}, {copies} cop{'y' if copies == 1 else 'ies'}"
            raise Wrong(f"{evidence}; {expected}", "Look at: over which ranks is it split, and over which copied?")
