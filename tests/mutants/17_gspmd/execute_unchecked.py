"""Does not check that the lengths agree.

caught by: execute · rejections
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.placements import Equation
from solutions.gspmd import MeshGroup, compute, make_mesh_group, plan_for, propagate, redistribute  # noqa: F401


@torch.no_grad()
def execute(equation: str, shards: Sequence[Tensor], placements: Sequence, mesh_group=None) -> Tensor:
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    shards = list(shards)
    for step in plan_for(parsed, placements, mesh_group.mesh).steps:
        group = mesh_group.groups[step.axis]
        shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
    return compute(parsed, shards)
