"""Checks for chapter 09: units whose parameters are unsharded while they compute, and a plain model that trains."""

import torch

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import begin_at, give_hints
from shared.checks.engine.sharded import unit_forward, unit_order, unit_wire
from shared.checks.engine.sharded.unit_memory import judge_memory
from shared.checks.engine.sharded.unit_training import UnitPlan, train_and_judge
from shared.checks.models import unit_models
from shared.checks.units import prefetcher, shards, states, unit_states

ShardedFlatParameter = Exercise("9.1", "ShardedFlatParameter")
Unit = Exercise("9.2", "Unit")
Forward = Exercise("9.3", "PlainZeRO3")
Backward = Exercise("9.4", "PlainZeRO3")
Prefetcher = Exercise("9.5", "Prefetcher")
Prefetching = Exercise("9.6", "PrefetchingZeRO3")
KeepsLast = Exercise("9.7", "KeepsLastBlock")

_OUT_OF_BOUNDS = "out of bounds for storage of size"
_RESHARDED = "has memory only while forward()"  # what a resharded parameter says
_HINT_ON_GROUPS = "Hint: how many ranks does the group have, and which group does the all-gather use?"
_HINT_ON_READERS = (
    "Hint: which unit's parameters were read while they had no memory? Is pre_backward() ever called for it?"
)


class PlainPlan(UnitPlan):
    """A training of PlainZeRO3. It prefetches nothing, and its constructor has no `prefetch`."""

    def __str__(self) -> str:
        return unit_models.describe(self.model)


# -- 9.1 and 9.2: the pieces

ShardedFlatParameter.check("plain parameters", world_sizes=(1, 2))(shards.plain_parameters_are_unsharded_and_resharded)
ShardedFlatParameter.check("start", world_sizes=(1, 2, 3))(shards.shards_hold_the_first_ranks_values)
ShardedFlatParameter.check("unshard", world_sizes=(1, 3, 4))(shards.unshard_gathers_every_shard)
ShardedFlatParameter.check("storage", world_sizes=(1, 2))(shards.backward_finds_what_it_saved)
ShardedFlatParameter.check("memory", world_sizes=(4,))(shards.only_the_shard_has_memory)

Unit.check("a plain forward", world_sizes=(1,))(states.forward_unshards_and_reshards)
Unit.check("states", world_sizes=(1,))(states.states_follow_the_table)
Unit.check("flat parameters", world_sizes=(1,))(states.work_is_done_once)


# -- 9.3: forward


@Forward.check("plain forward", world_sizes=(2,))
def a_plain_model_computes(attempt: Attempt) -> None:
    unit_states.judge_in_use(attempt, trains=False)
    unit_forward.judge_outputs(attempt, UnitPlan("Blocks"))


Forward.check("units after forward", world_sizes=(2,))(unit_states.blocks_are_sharded_and_the_root_stays)
Forward.check("backward hooks", world_sizes=(2,))(unit_states.backward_will_find_its_hooks)
Forward.check("forward wire", world_sizes=(2, 4))(
    on_each(unit_forward.judge_forward_wire, UnitPlan("Blocks"), UnitPlan("Whole"))
)
# A model with a small root, and one whose root is large enough to show.
Forward.check("forward memory", world_sizes=(4,))(
    on_each(
        unit_forward.judge_forward_memory,
        *(UnitPlan(model, dtype=torch.float32) for model in ("Deep", "DeepWhole")),
    )
)


# -- 9.4: a plain model trains


@Backward.check("plain model", world_sizes=(1, 2))
def a_plain_model_trains(attempt: Attempt) -> None:
    unit_states.judge_in_use(attempt, trains=True)
    train_and_judge(attempt, UnitPlan("Blocks"))


# Other optimizers, a single unit, and units that are called from last to first.
Backward.check("world sizes", world_sizes=(1, 3, 4))(
    on_each(train_and_judge, UnitPlan("Backwards", "AdamW"), UnitPlan("Whole", "UnknownOptimizer"))
)
Backward.check("wire", world_sizes=(2, 4))(
    on_each(unit_wire.judge_unit_traffic, [UnitPlan(model, steps=2) for model in ("Blocks", "Whole")])
)
Backward.check("memory", world_sizes=(4,))(
    begin_at(a_plain_model_trains, "plain model")(
        on_each(judge_memory, PlainPlan("Deep", dtype=torch.float32, options={"prefetch": 0}))
    )
)


# -- 9.5 to 9.7: prefetching

Prefetcher.check("plain order", world_sizes=(1,))(prefetcher.the_next_unit_is_launched)
Prefetcher.check("changing order", world_sizes=(1,))(prefetcher.a_changed_order_stops_it)
Prefetcher.check("backward", world_sizes=(1,))(prefetcher.backward_is_prefetched_in_reverse)

Prefetching.check("prefetched order", world_sizes=(2, 4))(unit_order.the_next_unit_is_in_flight)
Prefetching.check("prefetch=0", world_sizes=(2,))(unit_order.nothing_is_launched_ahead)
Prefetching.check("prefetched values", world_sizes=(2, 3))(
    on_each(
        train_and_judge,
        UnitPlan("Blocks", "AdamW", options={"prefetch": 1}),
        UnitPlan("Backwards", "AdamW", options={"prefetch": 2}),
    )
)
Prefetching.check("prefetched wire", world_sizes=(2,))(
    on_each(
        unit_wire.judge_unit_traffic,
        [UnitPlan(model, steps=3, options={"prefetch": 2}) for model in ("Blocks", "Backwards")],
    )
)
Prefetching.check("prefetched memory", world_sizes=(4,))(
    on_each(judge_memory, UnitPlan("Deep", dtype=torch.float32, options={"prefetch": 1}))
)
KeepsLast.check("kept values", world_sizes=(2, 3))(
    on_each(train_and_judge, UnitPlan("Blocks", "AdamW", options={"prefetch": 1}))
)
KeepsLast.check("kept wire", world_sizes=(2,))(
    on_each(unit_wire.judge_unit_traffic, [UnitPlan("Blocks", steps=3, options={"prefetch": 1}, keeps_last=True)])
)


@KeepsLast.check("kept order", world_sizes=(2, 4))
def the_block_before_is_still_prefetched(attempt: Attempt) -> None:
    unit_order.the_next_unit_is_in_flight(attempt, keeps_last=True)


give_hints(
    {
        "SIGSEGV": "Hint: whose memory is `shard` a view of after reshard()?",
        _OUT_OF_BOUNDS: "Hint: how many bytes does flat_param's storage have, and how many does it need?",
        "is invalid for input of size": _HINT_ON_GROUPS,
    },
    ShardedFlatParameter,
)
give_hints(
    {"doesn't require gradient": "This forward runs without gradients. Hint: will there be a backward?"}, Forward
)
give_hints(prefetcher.HINTS_ON_ERRORS, Prefetcher)
give_hints(
    dict.fromkeys(("SIGSEGV", _OUT_OF_BOUNDS, _RESHARDED), _HINT_ON_READERS), Forward, Backward, Prefetching, KeepsLast
)
