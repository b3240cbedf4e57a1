"""Asks the other ranks for their lengths first.

caught by: execute · DTensor
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.placements import Equation
from solutions.collectives import ring_all_gather
from solutions.gspmd import MeshGroup, check_lengths, compute, make_mesh_group, plan_for, propagate, redistribute  # noqa: F401


@torch.no_grad()
def execute(equation: str, shards: Sequence[Tensor], placements: Sequence, mesh_group=None) -> Tensor:
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    lengths = torch.tensor([shards[0].numel()], device=shards[0].device)
    for group in mesh_group.groups:
        ring_all_gather(lengths, group)
    shards = list(shards)
    for step in plan_for(parsed, placements, mesh_group.mesh).steps:
        group = mesh_group.groups[step.axis]
        shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
    return compute(parsed, shards)
