"""Process groups that are smaller than the world: their members, how to join them, and how to name them to students."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from shared.checks.engine.attempts import CALLED_ALONE, Attempt
from shared.checks.engine.failures import OUTSIDE_THE_GROUP
from shared.wire import instrumentation

# A rank's index in the group is not its rank in the world, and neighbors in the group are not neighbors in the world.
# The first group is smaller than the world and has no rank 0.
SUBGROUPS = {3: [(1, 2)], 4: [(1, 3), (0, 2, 3)]}


def members_of(attempt: Attempt, in_subgroup: bool) -> list[int]:
    """List the ranks that take part: those of the first subgroup, or all ranks."""
    return list(SUBGROUPS[attempt.world_size][0] if in_subgroup else range(attempt.world_size))


def join_subgroup(use: bool) -> tuple[Any, bool]:
    """Form the first subgroup, on every rank of the world. Returns it, and whether this rank is a member."""
    if not use:
        return None, True
    members = list(SUBGROUPS[dist.get_world_size()][0])
    return dist.new_group(members), dist.get_rank() in members


@contextlib.contextmanager
def staying_inside(members: Sequence[int] | None):
    """Raise an error if a rank is about to communicate with ranks outside its group, because that would hang."""

    def refuse(call: instrumentation.Call) -> None:
        partners = call.group_ranks if call.partner is None else (call.partner,)
        assert members is not None
        if not set(partners) <= set(members):
            what = f"{call.op} among ranks {list(call.group_ranks)}" if call.partner is None else str(call)
            raise AssertionError(f"{what}, {OUTSIDE_THE_GROUP} {list(members)}")

    if members is not None:
        instrumentation.before_launch.insert(0, refuse)  # before the comparison with other ranks, which would fail, too
    try:
        yield
    finally:
        if members is not None:
            instrumentation.before_launch.remove(refuse)


def called_alone(attempt: Attempt) -> str:
    members = members_of(attempt, True)
    return f"{CALLED_ALONE} ranks {members[0]} and {members[1]}, with the group {members}"
