"""Makes the steps along the first axis first.

caught by: execute · nested shards
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.placements import Equation
from solutions.gspmd import MeshGroup, check_lengths, compute, make_mesh_group, plan_for, propagate, redistribute  # noqa: F401


@torch.no_grad()
def execute(equation: str, shards: Sequence[Tensor], placements: Sequence, mesh_group=None) -> Tensor:
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    shards = list(shards)
    steps = plan_for(parsed, placements, mesh_group.mesh).steps
    for step in sorted(steps, key=lambda step: step.axis):
        group = mesh_group.groups[step.axis]
        shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
    return compute(parsed, shards)
