"""Checks for chapter 10: a ZeRO-3 that trains any model, and can be saved, loaded and created in shards."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints, where_it_raises
from shared.checks.engine.sharded import unit_order, unit_wire
from shared.checks.engine.sharded.unit_memory import DROPPED, FINISHED, judge_memory
from shared.checks.engine.sharded.unit_training import UnitPlan, train_and_judge
from shared.checks.engine.subgroups import called_alone
from shared.checks.models import awkward
from shared.checks.zero3 import backward, deferred, given, reducer, rows, saved

RowShards = Exercise("10.1", "RowShards", first="even rows")
GradientReducer = Exercise("10.2", "GradientReducer")
Given = Exercise("10", "ZeRO3")  # The lab gives this part of ZeRO3. It is checked in a ZeRO3 that is somebody's own.
Backward = Exercise("10.3", "ZeRO3", first="plain model")
ShardedState = Exercise("10.4", "ZeRO3")
Materializer = Exercise("10.5", "Materializer")

AWKWARD = ("Blocks", "Tied", "Frozen", "FrozenNorms", "Few", "Mixed", "Buffered", "Nested", "Twice", "Bundles", "Whole")
AWKWARD += awkward.HAVE_MODES
NO_PREFETCH = {"prefetch": 0}  # A mistake in prefetching then fails the checks of prefetching only.

_HINT_ON_READERS = (
    "Hint: which unit's parameters were read while they had no memory? Which hook should have unsharded it, or has "
    "resharded it too early?"
)
_HINT_ON_REPEATS = (
    "Hint: activation checkpointing repeats a unit's forward in the middle of its backward. How do the hooks of "
    "forward notice?"
)
_HINT_ON_PENDING = "Hint: forward() calls finish_gradient_sync() itself if `pending` is True. When should it be True?"
_HINT_ON_CALLS = (
    "Hint: for which units, or in which state, does post_forward() watch outputs although pre_forward() has watched no "
    "inputs?"
)
_HINT_ON_VALUES = (
    "Hint: an optimizer's state may hold values that are not tensors. What does your function do with them?"
)
_HINT_ON_UNREACHED = (
    "Backward does not reach all units of this model. Hint: how does the prefetcher learn which units to leave out?"
)
_HINT_ON_SETS = (
    "Hint: which line changes a set while a loop iterates over it? Could that wait until the loop has ended?"
)
_HINT_ON_STRIDES = "This parameter is not contiguous. Hint: which method flattens such a tensor, too?"
_HINT_ON_SECOND = "Hint: has backward finished with all calls of this unit when its gradients are reduced?"

# -- 10.1: parameters that are sharded by their rows

RowShards.check("even rows", world_sizes=(2,))(rows.rows_that_divide_come_and_go)
RowShards.check("copy-in", world_sizes=(1, 2, 4))(rows.slots_are_padded)
RowShards.check("copy-out", world_sizes=(1, 2, 4))(rows.parameters_come_out_of_the_slots)
RowShards.check("one all-gather", world_sizes=(1, 2, 4))(rows.one_all_gather_carries_all)


# -- 10.2: a small object

GradientReducer.check("plain backward", world_sizes=(1,))(reducer.packed_in_backward_and_launched_on_demand)
GradientReducer.check("missing gradients", world_sizes=(1,))(reducer.missing_gradients_count_as_zeros)
GradientReducer.check("second gradient", world_sizes=(1,))(reducer.a_second_gradient_is_rejected)


# -- given: forward, and full state dicts

Given.check("plain forward", world_sizes=(2,))(given.a_plain_model_computes)
Given.check("forward values")(given.outputs_equal_one_process)
Given.check("parameters", world_sizes=(1, 3))(given.parameters_are_shards)
Given.check("forward wire", world_sizes=(2, 4))(given.each_unit_is_gathered_once)
Given.check("forward memory", world_sizes=(4,))(given.only_computing_units_are_unsharded)
Given.check("backward hooks", world_sizes=(2,))(backward.backward_will_call_its_hooks)
Given.check("forward order", world_sizes=(2,))(backward.the_next_unit_is_in_flight)
Given.check("states", world_sizes=(1, 2))(given.forward_leaves_what_backward_needs)
Given.check("full state", world_sizes=(1, 2, 4))(given.it_is_a_plain_state)
Given.check("another world size", world_sizes=(1, 3))(given.any_number_of_ranks_can_load_it)
Given.check("another module", world_sizes=(2,))(given.states_of_other_modules_are_rejected)


# -- 10.3: backward, and prefetching in it


@Backward.check("plain model", world_sizes=(2,))
def a_plain_model_trains(attempt: Attempt) -> None:
    train_and_judge(attempt, UnitPlan("Blocks", options=NO_PREFETCH))


@Backward.check("awkward models")
def training_equals_one_process(attempt: Attempt) -> None:
    some = {1: 2, 2: len(AWKWARD), 3: 2, 4: 2}[attempt.world_size]
    for number, model in enumerate(attempt.random.sample(AWKWARD, some)):
        options = NO_PREFETCH | {"reshard_after_forward": attempt.random.random() < 0.7}
        train_and_judge(attempt, UnitPlan(model, ("AdamW", "SGD", "UnknownOptimizer")[number % 3], options=options))


@Backward.check("unused on one rank", world_sizes=(2, 4))
def a_parameter_may_be_unused_somewhere(attempt: Attempt) -> None:
    for model in ("Branches", "Spare", "Towers"):
        train_and_judge(attempt, UnitPlan(model, options=NO_PREFETCH))
    backward.a_batch_may_be_skipped(attempt)


@Backward.check("accumulation", world_sizes=(1, 3))
@where_it_raises({"finish_gradient_sync": _HINT_ON_PENDING})
def micro_batches_add_up(attempt: Attempt) -> None:
    for finish_each in (True, False):
        train_and_judge(attempt, UnitPlan("Tied", micro_batches=3, finish_each=finish_each, options=NO_PREFETCH))


@Backward.check("checkpoints", world_sizes=(1, 2))
@where_it_raises(
    {
        "SIGSEGV": _HINT_ON_REPEATS,
        "out of bounds for storage of size": _HINT_ON_REPEATS,
        "has memory only while forward()": _HINT_ON_REPEATS,
    }
)
def blocks_may_be_recomputed(attempt: Attempt) -> None:
    for model in ("Checkpointed", "Recomputed"):
        plan = UnitPlan(model, "AdamW", options=NO_PREFETCH)
        unit_wire.judge_traffic(plan, train_and_judge(attempt, plan))


Backward.check("several forwards", world_sizes=(1, 3))(backward.two_forwards_may_share_a_backward)
Backward.check("second backward", world_sizes=(1, 2))(backward.a_second_backward_is_rejected)


@Backward.check("wire", world_sizes=(2, 4))
def parameters_are_sent_twice_and_gradients_once(attempt: Attempt) -> None:
    kept = NO_PREFETCH | {"reshard_after_forward": False}
    plans = [UnitPlan(model, steps=2, options=NO_PREFETCH) for model in ("Blocks", "Frozen", "Mixed")]
    plans += [UnitPlan(model, steps=1, options=NO_PREFETCH) for model in ("Few", "Whole", "Tied", "Twice")]
    plans.append(UnitPlan("Blocks", steps=1, options=kept))
    unit_wire.judge_unit_traffic(attempt, plans)
    each_micro_batch_sends_as_much(attempt)


@where_it_raises({"finish_gradient_sync": _HINT_ON_PENDING})
def each_micro_batch_sends_as_much(attempt: Attempt) -> None:
    plan = UnitPlan("Blocks", steps=1, options=NO_PREFETCH, micro_batches=2, finish_each=False)
    unit_wire.judge_unit_traffic(attempt, [plan])


Backward.check("after backward", world_sizes=(1, 2))(backward.nothing_stays_unsharded)


@Backward.check("memory", world_sizes=(4,))
def only_computing_units_have_memory(attempt: Attempt) -> None:
    for skipped in ("", DROPPED, FINISHED):
        judge_memory(attempt, UnitPlan("Deep", dtype=torch.float32, options=NO_PREFETCH), skipped)


Backward.check("prefetched order", world_sizes=(2, 4))(unit_order.the_next_unit_is_in_flight)
Backward.check("prefetch=0", world_sizes=(2,))(unit_order.nothing_is_launched_ahead)


@Backward.check("prefetched values", world_sizes=(2, 3))
def prefetching_changes_no_value(attempt: Attempt) -> None:
    models = ("Turns", "Twice", "Nested", "Branches", "Recomputed", "Frozen", "Tied", "Towers")
    for model in models if attempt.world_size == 2 else attempt.random.sample(models, 2):
        train_and_judge(attempt, UnitPlan(model, "AdamW", options={"prefetch": attempt.random.choice((1, 2))}))


@Backward.check("prefetched wire", world_sizes=(2,))
def prefetching_sends_no_more(attempt: Attempt) -> None:
    unit_wire.nothing_travels_in_vain(attempt)
    models = ("Blocks", "Frozen", "Recomputed", "Backwards")
    plans = [UnitPlan(model, steps=3, options={"prefetch": 2}) for model in models]
    kept = UnitPlan("Blocks", steps=3, options={"reshard_after_forward": False})
    for plan in (*plans, kept):
        try:
            unit_wire.judge_unit_traffic(attempt, [plan])
        except Wrong as wrong:
            if plan.model == "Frozen" and wrong.hint == unit_wire.HINT_ON_MUCH:
                wrong.hint = _HINT_ON_UNREACHED
            raise


@Backward.check("prefetched memory", world_sizes=(4,))
def one_more_unit_is_unsharded(attempt: Attempt) -> None:
    """Compute in bfloat16, so that unsharded parameters are half as large."""
    judge_memory(attempt, UnitPlan("Deep", dtype=torch.float32, options={"compute_dtype": torch.bfloat16}))


# -- 10.4: sharded state dicts, and everything together

ShardedState.check("sharded state", world_sizes=(4,))(saved.any_number_of_ranks_resumes)
ShardedState.check("trained shards", world_sizes=(2,))(saved.each_state_belongs_to_its_shard)


@ShardedState.check("everything")
def training_with_everything(attempt: Attempt) -> None:
    for model in attempt.random.sample((*AWKWARD, "Branches", "Checkpointed"), 1):
        options = {"reshard_after_forward": attempt.random.random() < 0.5, "prefetch": attempt.random.randrange(3)}
        train_and_judge(attempt, UnitPlan(model, attempt.random.choice(("AdamW", "Adam")), options=options))


@ShardedState.check("clip", world_sizes=(1, 2, 3))
def clipping_equals_one_process(attempt: Attempt) -> None:
    models = ("Tied", "Frozen", "Mixed", "Few")
    for model in models if attempt.world_size == 2 else attempt.random.sample(models, 1):
        train_and_judge(attempt, UnitPlan(model, steps=3, max_norm=0.05))
    train_and_judge(attempt, UnitPlan("Blocks", steps=2, max_norm=100.0))
    unit_wire.one_element_more_travels(attempt)


@ShardedState.check("bf16", world_sizes=(2, 4))
def it_computes_in_another_dtype(attempt: Attempt) -> None:
    """Compare values in float32, which a float64 model can compute in, because bfloat16 has too few digits."""
    unit_wire.bf16_halves_what_travels(attempt)
    if attempt.world_size == 2:
        train_and_judge(attempt, UnitPlan("Frozen", steps=3, options={"compute_dtype": torch.float32}))


@ShardedState.check("group", world_sizes=(3, 4))
def it_stays_inside_its_group(attempt: Attempt) -> None:
    plan = UnitPlan("Frozen", steps=3, in_subgroup=True, max_norm=0.05)
    for rank, result in train_and_judge(attempt, plan).items():
        for name, value in result.steps[-1].state.items():
            if name not in result.whole or not torch.equal(result.whole[name], value):
                evidence = (
                    f"{called_alone(attempt)}, {plan}: in full_state_dict(), {name} is not what the model computes with"
                )
                raise Wrong({rank: evidence}, "Hint: which ranks' shards do you concatenate?")


ShardedState.check("a module", world_sizes=(2,))(saved.it_is_like_its_module)
ShardedState.check("own state", world_sizes=(1, 3))(saved.its_own_state_can_be_loaded)


# -- 10.5: deferred initialization

Materializer.check("plain model", world_sizes=(2,))(deferred.a_plain_model_is_materialized)
Materializer.check("values", world_sizes=(1, 3))(deferred.values_depend_on_names_alone)
Materializer.check("cuts")(deferred.every_cut_is_right)
Materializer.check("awkward models", world_sizes=(2,))(deferred.awkward_models_are_materialized)
Materializer.check("memory", world_sizes=(4,))(deferred.one_parameter_exists_at_a_time)

give_hints({"'int' object has no attribute": _HINT_ON_VALUES}, ShardedState)
give_hints({"view size is not compatible": _HINT_ON_STRIDES}, Materializer)
give_hints({"Set changed size during iteration": _HINT_ON_SETS}, GradientReducer)
give_hints(
    {
        "self.calls.pop(unit)": _HINT_ON_CALLS,
        "SIGSEGV": _HINT_ON_READERS,
        "out of bounds for storage of size": _HINT_ON_READERS,
        "has memory only while forward()": _HINT_ON_READERS,  # what a resharded parameter says
        "data is not allocated yet": _HINT_ON_READERS,
        "SIGABRT": "Hint: which collective does each rank launch next?",
        "CheckpointException": "Hint: does each tensor in the state record its position in the global tensor?",
        "finish_gradient_sync": _HINT_ON_SECOND,
        "0-dim tensor": "Hint: which entries of the optimizer's state have no dimensions, and are they shards?",
    },
    *(Given, Backward, ShardedState),
)
