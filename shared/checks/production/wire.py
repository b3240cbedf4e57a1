"""Judge what fully_shard sends: each unit is all-gathered once or twice and reduced once, in the right dtypes.

Each parameter is split by rows, and rows are padded to a multiple of the number of ranks that share them.
"""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.checks.production.training import OnRank, Sharding, Unit, probe_sharded, train_and_judge, units_of

_FAMILIES = ("all_gather", "reduce_scatter", "all_reduce")
_HINT_ON_UNITS = "Hint: for which modules do you call fully_shard(), and which parameters remain for the last call?"
_HINT_ON_NO_UNITS = "An empty list is not None. Hint: which units does your code choose for each of the two?"
_HINT_ON_ITERATORS = "An iterator can be read only once. Hint: which units does your loop still find?"
_HINT_ON_BACKWARD = "Hint: which units are still unsharded when backward begins? Is the root one of them?"
_HINT_ON_DTYPES = "Hint: in which dtype are parameters all-gathered, and in which are gradients reduced?"
_HINT_ON_GROUPS = "Hint: which ranks share one copy of the parameters, and which ranks hold the same shard?"


def judge_wire(plan: Sharding, rank: int, calls: list, world_size: int, context: str) -> None:
    """Judge what one step sent for its units, in which groups and dtypes.

    Raises:
        Wrong: If something else was sent.
    """
    copies, shard_ranks = plan.copies, world_size // plan.copies
    units, own_copy = units_of(plan, shard_ranks), rank // shard_ranks
    inside = tuple(range(own_copy * shard_ranks, (own_copy + 1) * shard_ranks))
    across = tuple(range(rank % shard_ranks, world_size, shard_ranks))
    again = units[:-1] if plan.options.get("reshard_after_forward", True) else []
    calls = [call for call in calls if len(call.group_ranks) > 1]  # A group of one rank sends nothing.
    found = {name: [call for call in calls if call.op.startswith(name)] for name in _FAMILIES}
    strangers = [call for call in calls if not call.op.startswith(_FAMILIES)]
    if strangers:
        raise Wrong(
            {
                rank: (
                    f"{context}: {describe_calls(strangers)}; expected only all-gathers, reduce-scatters and "
                    "all-reduces"
                )
            },
            _HINT_ON_UNITS,
        )
    gathers = found["all_gather"]
    first_hint = _hint_on_units(plan, sum(not call.in_backward for call in gathers))
    phases = [("in forward", False, units, first_hint), ("in backward", True, again, _HINT_ON_BACKWARD)]
    for phase, in_backward, expected, hint in phases if shard_ranks > 1 else ():
        own = [call for call in gathers if call.in_backward == in_backward]
        _judge(rank, own, expected, plan.computed, inside, f"{context}, all-gathers {phase}", hint)
    if shard_ranks > 1:
        _judge(
            rank, found["reduce_scatter"], units, plan.reduced, inside, f"{context}, reduce-scatters", _HINT_ON_UNITS
        )
    if copies > 1 and shard_ranks > 1:
        shards = [Unit(unit.numel // shard_ranks, unit.padded_numel // shard_ranks) for unit in units]
        _judge(rank, found["all_reduce"], shards, plan.reduced, across, f"{context}, all-reduces", _HINT_ON_GROUPS)
    elif found["all_reduce"] and copies == 1:
        raise Wrong(
            {rank: f"{context}: {describe_calls(found['all_reduce'])}; expected no all_reduce"}, _HINT_ON_GROUPS
        )


def _hint_on_units(plan: Sharding, sharded_units: int) -> str:
    kind = unit_models.KINDS[plan.model].units
    if kind == "none" and sharded_units > 1:
        return _HINT_ON_NO_UNITS
    return _HINT_ON_ITERATORS if kind == "nested" and sharded_units == 1 else _HINT_ON_UNITS


def _judge(
    rank: int, calls: list, units: list[Unit], dtype: torch.dtype, ranks: tuple, context: str, hint: str
) -> None:
    sent = sum(call.payload_bytes for call in calls)
    least, most = (dtype.itemsize * sum(getattr(unit, what) for unit in units) for what in ("numel", "padded_numel"))
    expected = f"{context}: {describe_calls(calls)}; expected {len(units)} with {most} bytes in {_dtype_name(dtype)}"
    if any(call.group_ranks != ranks for call in calls):
        group = next(call.group_ranks for call in calls if call.group_ranks != ranks)
        raise Wrong({rank: f"{context}: sent among ranks {group}; expected {ranks}"}, _HINT_ON_GROUPS)
    if len(calls) != len(units):
        raise Wrong({rank: expected}, hint)
    if calls and {call.dtype for call in calls} - {_dtype_name(dtype), "uint8"}:
        raise Wrong({rank: f"{expected}; they are in {calls[0].dtype}"}, _HINT_ON_DTYPES)
    if not least <= sent <= most:
        raise Wrong({rank: expected}, _HINT_ON_DTYPES)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def judge_building(plan: Sharding, found: list[OnRank]) -> None:
    """Judge that each parameter and buffer is sent at most once.

    Raises:
        Wrong: If more is sent.
    """
    module = unit_models.build(plan.model, 0, plan.dtype)
    most = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    for rank, result in enumerate(found):
        if sum(call.payload_bytes for call in result.building) > most:
            evidence = f"{plan}, in fully_sharded(): {describe_calls(result.building)}; expected at most {most} bytes"
            raise Wrong({rank: evidence}, "Hint: how many times is each tensor sent?")


def every_step_sends(attempt: Attempt, plan: Sharding) -> None:
    """Judge the values, and what each step sends.

    Raises:
        Wrong: If either is wrong.
    """
    _judge_steps(attempt, plan, train_and_judge(attempt, plan))


def every_step_sends_in_bf16(attempt: Attempt) -> None:
    """Judge only what is sent, because bfloat16 rounds values by more than a mistake would change them."""
    plan = Sharding("Blocks", steps=1, options={"compute_dtype": torch.bfloat16})
    found = attempt.run(probe_sharded, plan, per_rank=Draw(attempt).per_rank, context=str(plan))
    _judge_steps(attempt, plan, found)


def frozen_units_are_gathered(attempt: Attempt) -> None:
    """Judge only forward: whether backward all-gathers frozen parameters is up to torch."""
    plan = Sharding("Frozen", steps=1)
    units, everyone = units_of(plan, attempt.world_size), tuple(range(attempt.world_size))
    for rank, result in enumerate(train_and_judge(attempt, plan)):
        calls = [call for call in result.steps[0].calls if call.op.startswith("all_gather")]
        own = [call for call in calls if not call.in_backward]
        _judge(rank, own, units, plan.computed, everyone, f"{plan}, all-gathers in forward", _HINT_ON_UNITS)


def _judge_steps(attempt: Attempt, plan: Sharding, found: list[OnRank]) -> None:
    judge_building(plan, found)
    for rank, result in enumerate(found):
        for number, step in enumerate(result.steps, 1):
            judge_wire(plan, rank, step.calls, attempt.world_size, f"{plan}, step {number}")
