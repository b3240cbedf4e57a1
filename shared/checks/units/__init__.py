"""Checks for chapter 09: units whose parameters are unsharded while they compute, and a plain model that trains."""

import torch

from shared.checks.engine.framework import Attempt, Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.engine.sharded import unit_wire
from shared.checks.engine.sharded.unit_memory import judge_memory
from shared.checks.engine.sharded.unit_training import UnitPlan, train_and_judge
from shared.checks.units import owners, shards, states

ShardedFlatParameter = Exercise("9.1", "ShardedFlatParameter", optional=True)
Unit = Exercise("9.2", "Unit", optional=True)
owned_parameters = Exercise("9.3", "owned_parameters", optional=True)
PlainZeRO3 = Exercise("9.4", "PlainZeRO3", optional=True)

_OUT_OF_BOUNDS = "out of bounds for storage of size"
_HINT_ON_READERS = (
    "Hint: which unit's parameters were read while they had no memory? Is pre_backward() ever called for it?"
)

# -- 9.1 to 9.3: the pieces

ShardedFlatParameter.check("plain parameters", world_sizes=(2,))(shards.plain_parameters_are_unsharded_and_resharded)
ShardedFlatParameter.check("start", world_sizes=(1, 2, 3))(shards.shards_hold_the_first_ranks_values)
ShardedFlatParameter.check("unshard", world_sizes=(1, 3, 4))(shards.unshard_gathers_every_shard)
ShardedFlatParameter.check("storage", world_sizes=(1, 2))(shards.backward_finds_what_it_saved)
ShardedFlatParameter.check("memory", world_sizes=(4,))(shards.only_the_shard_has_memory)

Unit.check("a plain forward", world_sizes=(1,))(states.forward_unshards_and_reshards)
Unit.check("states", world_sizes=(1,))(states.states_follow_the_table)
Unit.check("flat parameters", world_sizes=(1,))(states.work_is_done_once)

owned_parameters.check("nested units", world_sizes=(1,))(owners.innermost_units_own)
owned_parameters.check("owners", world_sizes=(1,))(owners.each_has_one_owner)
owned_parameters.check("foreign modules", world_sizes=(1,))(owners.strangers_are_rejected)


# -- 9.4: a plain model trains

NO_PREFETCH = {"prefetch": 0}  # The class that this exercise builds does not prefetch.


@PlainZeRO3.check("plain model", world_sizes=(2,))
def a_plain_model_trains(attempt: Attempt) -> None:
    train_and_judge(attempt, UnitPlan("Blocks", options=NO_PREFETCH))


@PlainZeRO3.check("world sizes", world_sizes=(1, 3, 4))
def any_number_of_ranks_trains_it(attempt: Attempt) -> None:
    """Try other optimizers, a single unit, and units that are called from last to first."""
    train_and_judge(attempt, UnitPlan("Backwards", "AdamW", options=NO_PREFETCH))
    train_and_judge(attempt, UnitPlan("Whole", "Hiker", options=NO_PREFETCH))


@PlainZeRO3.check("wire", world_sizes=(2, 4))
def each_unit_is_all_gathered_twice_and_reduce_scattered_once(attempt: Attempt) -> None:
    unit_wire.judge_unit_traffic(
        attempt, [UnitPlan(model, steps=2, options=NO_PREFETCH) for model in ("Blocks", "Whole")]
    )


@PlainZeRO3.check("memory", world_sizes=(4,))
def only_computing_units_have_memory(attempt: Attempt) -> None:
    judge_memory(attempt, UnitPlan("Deep", dtype=torch.float32, options=NO_PREFETCH))


give_hints(
    {
        "SIGSEGV": "Hint: whose memory is `shard` a view of after reshard()?",
        _OUT_OF_BOUNDS: "Hint: how many bytes does flat_param's storage have, and how many does it need?",
    },
    ShardedFlatParameter,
)
give_hints({"SIGSEGV": _HINT_ON_READERS, _OUT_OF_BOUNDS: _HINT_ON_READERS}, PlainZeRO3)
