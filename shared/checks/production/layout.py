"""Describe and judge fully_shard's layout: each parameter is split by rows over the ranks that share a copy.

Rows are padded to a multiple of the number of ranks when they are sent, but not when they are stored.
"""

from dataclasses import dataclass

import torch

from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.unit_layout import owners
from shared.checks.engine.sharded.unit_training import UnitPlan
from shared.checks.models import unit_models


@dataclass(frozen=True)
class Unit:
    """Hold a unit's number of elements, without and with padding."""

    numel: int
    padded_numel: int


def units_of(plan: UnitPlan, shard_ranks: int) -> list[Unit]:
    """List the units of a model, the root last."""
    module = unit_models.build(plan.model, 0, plan.dtype)
    owned = owners(module, unit_models.units_of(plan.model, module)).values()
    return [Unit(sum(p.numel() for p in each), sum(padded_numel(p, shard_ranks) for p in each)) for each in owned]


def padded_numel(parameter: torch.Tensor, shard_ranks: int) -> int:
    rows = parameter.shape[0]
    return -(-rows // shard_ranks) * shard_ranks * (parameter.numel() // rows)


def judge_shards(plan: UnitPlan, shards: list[dict], copies: int) -> None:
    """Judge where the rows of each parameter are.

    Args:
        plan: What is trained, and how.
        shards: For each rank, its shards by the parameter's name.
        copies: The number of copies of the model.

    Raises:
        Wrong: Unless each parameter is a DTensor, each rank holds only its rows, and no row is missing.
    """
    shard_ranks = len(shards) // copies
    for name, parameter in unit_models.build(plan.model, 0, plan.dtype).named_parameters():
        held = [own[name] for own in shards]
        most = padded_numel(parameter, shard_ranks) // shard_ranks * parameter.itemsize
        for rank, part in enumerate(held):
            if part.dim is None:
                raise Wrong(
                    {rank: f"{plan}: {name} is not sharded; expected a DTensor"},
                    "Hint: which call shards this parameter?",
                )
            if part.local.dtype != parameter.dtype:
                context = f"{plan}: {name} is stored in {part.local.dtype}; expected {parameter.dtype}"
                raise Wrong({rank: context}, "Hint: in which dtype should a shard be stored?")
            if part.local.nbytes > most:
                context = f"{plan}: {part.local.nbytes:,} bytes of {name} are held; expected at most {most:,}"
                raise Wrong({rank: context}, "Hint: over which ranks is this parameter split?")
        in_all = sum(part.local.nbytes for part in held)
        if in_all != copies * parameter.nbytes:
            evidence = f"{plan}: all ranks together hold {in_all:,} bytes of {name}"
            expected = f"expected {copies * parameter.nbytes:,} for {copies} cop{'y' if copies == 1 else 'ies'}"
            hint = "Hint: over which ranks is this parameter split, and over which is it replicated?"
            if copies > 1:
                hint = f"{hint} Which mesh does each call of fully_shard() get?"
            raise Wrong(f"{evidence}; {expected}", hint)
