"""What fully_shard sends for a model of units: gathered once or twice each, and reduced once, in their dtypes.

Each parameter is split by its rows, and rows are filled up to a multiple of the ranks that share them.
"""

import torch

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.checks.production.layout import Unit, units_of
from shared.checks.production.training import Sharding, probe_sharded, train_and_judge

_FAMILIES = ("all_gather", "reduce_scatter", "all_reduce")
_LOOK_AT_UNITS = "Look at: for which modules is fully_shard called, and which parameters are left to the last call?"
_LOOK_AT_BACKWARD = "Look at: whose parameters are still here when backward begins, and whose are not?"
_LOOK_AT_DTYPES = "Look at: which dtype has what is gathered, and which what is added up?"
_LOOK_AT_GROUPS = "Look at: which ranks share one copy of the parameters, and which hold the same part of it?"


def judge_wire(plan: Sharding, rank: int, calls: list, world_size: int, said: str) -> None:
    """Raises: Wrong unless one step sent what its units need, to whom, and in their dtypes."""
    copies, shard_ranks = plan.copies, world_size // plan.copies
    units, own_copy = units_of(plan, shard_ranks), rank // shard_ranks
    inside = tuple(range(own_copy * shard_ranks, (own_copy + 1) * shard_ranks))
    across = tuple(range(rank % shard_ranks, world_size, shard_ranks))
    again = units[:-1] if plan.options.get("reshard_after_forward", True) else []
    calls = [call for call in calls if len(call.group_ranks) > 1]  # alone, a rank sends nothing
    found = {name: [call for call in calls if call.op.startswith(name)] for name in _FAMILIES}
    strangers = [call for call in calls if not call.op.startswith(_FAMILIES)]
    if strangers:
        raise Wrong({rank: f"{said}: {describe_calls(strangers)}; expected none of these"}, _LOOK_AT_UNITS)
    gathers = found["all_gather"]
    phases = [("in forward", False, units, _LOOK_AT_UNITS), ("in backward", True, again, _LOOK_AT_BACKWARD)]
    for phase, in_backward, expected, hint in phases if shard_ranks > 1 else ():
        own = [call for call in gathers if call.in_backward == in_backward]
        _judge(rank, own, expected, plan.computed, inside, f"{said}, all-gathers {phase}", hint)
    if shard_ranks > 1:
        _judge(rank, found["reduce_scatter"], units, plan.reduced, inside, f"{said}, reduce-scatters", _LOOK_AT_UNITS)
    if copies > 1 and shard_ranks > 1:
        parts = [Unit(unit.numbers // shard_ranks, unit.filled // shard_ranks) for unit in units]
        _judge(rank, found["all_reduce"], parts, plan.reduced, across, f"{said}, all-reduces", _LOOK_AT_GROUPS)
    elif found["all_reduce"] and copies == 1:
        raise Wrong({rank: f"{said}: {describe_calls(found['all_reduce'])}; expected no all_reduce"}, _LOOK_AT_GROUPS)


def _judge(rank: int, calls: list, units: list[Unit], dtype: torch.dtype, ranks: tuple, said: str, hint: str) -> None:
    sent = sum(call.payload_bytes for call in calls)
    least, most = (dtype.itemsize * sum(getattr(unit, what) for unit in units) for what in ("numbers", "filled"))
    expected = f"{said}: {describe_calls(calls)}; expected {len(units)}, {most} bytes in {_said(dtype)}"
    if any(call.group_ranks != ranks for call in calls):
        group = next(call.group_ranks for call in calls if call.group_ranks != ranks)
        raise Wrong({rank: f"{said}: among ranks {group}; expected {ranks}"}, _LOOK_AT_GROUPS)
    if len(calls) != len(units):
        raise Wrong({rank: expected}, hint)
    if calls and {call.dtype for call in calls} - {_said(dtype), "uint8"}:
        raise Wrong({rank: f"{expected}; they are in {calls[0].dtype}"}, _LOOK_AT_DTYPES)
    if not least <= sent <= most:
        raise Wrong({rank: expected}, _LOOK_AT_DTYPES)


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def judge_building(plan: Sharding, found: list[dict]) -> None:
    """Raises: Wrong where more than every parameter and buffer is sent once."""
    module = unit_models.build(plan.model, 0, plan.dtype)
    most = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    for rank, result in enumerate(found):
        if sum(call.payload_bytes for call in result["building"]) > most:
            said = f"{plan}, when it is sharded: {describe_calls(result['building'])}; expected at most {most} bytes"
            raise Wrong({rank: said}, "Look at: is each tensor sent once?")


def every_step_sends(attempt: Attempt, plan: Sharding) -> None:
    """Raises: Wrong unless values are right and each step sends what it must."""
    _judge_steps(attempt, plan, train_and_judge(attempt, plan))


def every_step_sends_in_bf16(attempt: Attempt) -> None:
    """Values are not judged: what bfloat16 rounds is more than a mistake changes."""
    plan = Sharding("Blocks", steps=1, options={"compute_dtype": torch.bfloat16})
    found = attempt.run(probe_sharded, plan, per_rank=Draw(attempt).per_rank, context=str(plan))
    _judge_steps(attempt, plan, found)


def frozen_units_are_gathered(attempt: Attempt) -> None:
    """In forward, that is: whether backward needs what takes no gradient is torch's own affair."""
    plan = Sharding("Frozen", steps=1)
    units, everyone = units_of(plan, attempt.world_size), tuple(range(attempt.world_size))
    for rank, result in enumerate(train_and_judge(attempt, plan)):
        calls = [call for call in result["steps"][0]["training"] if call.op.startswith("all_gather")]
        own = [call for call in calls if not call.in_backward]
        _judge(rank, own, units, plan.computed, everyone, f"{plan}, all-gathers in forward", _LOOK_AT_UNITS)


def _judge_steps(attempt: Attempt, plan: Sharding, found: list[dict]) -> None:
    judge_building(plan, found)
    for rank, result in enumerate(found):
        for number, step in enumerate(result["steps"], 1):
            judge_wire(plan, rank, step["training"], attempt.world_size, f"{plan}, step {number}")
