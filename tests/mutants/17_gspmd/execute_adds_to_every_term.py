"""Applies an operation that is not linear to a Partial input, and reduces afterwards.

caught by: execute · operations
"""

import torch

from shared.placements import Equation
from solutions.gspmd import MeshGroup, check_lengths, compute, make_mesh_group, plan_for, propagate, redistribute  # noqa: F401


@torch.no_grad()
def execute(equation, shards, placements, mesh_group=None):
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    plan, shards = plan_for(parsed, placements, mesh_group.mesh), list(shards)
    if parsed.operation in ("relu", "exp", "square", "plus_one"):
        shards = [compute(parsed, shards)]
        parsed = Equation("einsum", (parsed.output,), parsed.output)
    for step in plan.steps:
        group = mesh_group.groups[step.axis]
        shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
    return compute(parsed, shards)
