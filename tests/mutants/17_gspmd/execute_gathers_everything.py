"""Gathers all inputs, computes the whole result, and keeps its own part.

caught by: execute · wire
"""

import torch

from shared.placements import Equation, Replicate, as_placements
from solutions.gspmd import MeshGroup, check_lengths, compute, make_mesh_group, plan_for, propagate, redistribute  # noqa: F401


@torch.no_grad()
def execute(equation, shards, placements, mesh_group=None):
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    wholes = []
    for shard, each, term in zip(shards, placements, parsed.inputs, strict=True):
        for axis, placement in reversed(list(enumerate(as_placements(each, len(term))))):
            shard = redistribute(shard, placement, Replicate(), mesh_group.groups[axis])
        wholes.append(shard)
    result = compute(parsed, wholes)
    for axis, placement in enumerate(plan_for(parsed, placements, mesh_group.mesh).output):
        result = redistribute(result, Replicate(), placement, mesh_group.groups[axis])
    return result
