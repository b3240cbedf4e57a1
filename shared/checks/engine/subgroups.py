"""Groups that are not the whole world: who is in them, on a rank and in words."""

import torch.distributed as dist

from shared.checks.engine.framework import Attempt

SUBGROUPS = {3: [1, 2], 4: [1, 3]}  # without rank 0, smaller than the world, and not always neighbours


def join_subgroup(use: bool):
    """Form the world's subgroup, on every rank of the world. → (group, am I in it)"""
    if not use:
        return None, True
    members = SUBGROUPS[dist.get_world_size()]
    return dist.new_group(members), dist.get_rank() in members


def called_alone(attempt: Attempt) -> str:
    members = SUBGROUPS[attempt.world_size]
    return f"called by ranks {members[0]} and {members[1]} alone, as the group {members}"
