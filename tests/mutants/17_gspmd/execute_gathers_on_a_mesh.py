"""Gathers all inputs if the mesh has two axes.

caught by: execute · mesh wire
"""

import torch

from shared.placements import Equation, Replicate, as_placements
from solutions.gspmd import MeshGroup, check_lengths, compute, make_mesh_group, plan_for, propagate, redistribute  # noqa: F401


@torch.no_grad()
def execute(equation, shards, placements, mesh_group=None):
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    if len(mesh_group.groups) == 1:
        shards = list(shards)
        for step in plan_for(parsed, placements, mesh_group.mesh).steps:
            group = mesh_group.groups[step.axis]
            shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
        return compute(parsed, shards)
    wholes = []
    for shard, each, term in zip(shards, placements, parsed.inputs, strict=True):
        for axis, placement in reversed(list(enumerate(as_placements(each, len(term))))):
            shard = redistribute(shard, placement, Replicate(), mesh_group.groups[axis])
        wholes.append(shard)
    result = compute(parsed, wholes)
    for axis, placement in enumerate(plan_for(parsed, placements, mesh_group.mesh).output):
        result = redistribute(result, Replicate(), placement, mesh_group.groups[axis])
    return result
