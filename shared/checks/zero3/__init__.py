"""Checks for chapter 09: parameters that are gathered unit by unit while a unit computes, and freed when it is done."""

import torch

from shared.checks.engine.framework import Attempt, Exercise, Wrong
from shared.checks.engine.hints import give_hints
from shared.checks.engine.sharded.unit_training import UnitPlan, train_and_judge
from shared.checks.engine.subgroups import called_alone
from shared.checks.models import awkward
from shared.checks.zero3 import (
    backward,
    forward,
    lives,
    order,
    saved,
    state,
    states,
    unit_owners,
    unit_shards,
    unit_states,
    wire,
)
from shared.checks.zero3.memory import judge_memory

ShardedParameters = Exercise("9.1", "ShardedParameters", optional=True)
Unit = Exercise("9.2", "Unit", optional=True)
owned_parameters = Exercise("9.3", "owned_parameters", optional=True)
GathersForForward = Exercise("9.4", "GathersForForward", optional=True, stands_in="ZeRO3")
ReducesGradients = Exercise("9.5", "ReducesGradients", optional=True, stands_in="ZeRO3")
LooksAhead = Exercise("9.6", "LooksAhead", optional=True, stands_in="ZeRO3")
ZeRO3 = Exercise("9.7", "ZeRO3")

AWKWARD = ("Blocks", "Tied", "Frozen", "FrozenNorms", "Few", "Mixed", "Buffered", "Nested", "Twice", "Bundles", "Whole")
AWKWARD += awkward.HAVE_MODES

_OUT_OF_BOUNDS = "out of bounds for storage of size"
_LOOK_AT_READERS = "Look at: which unit was read without its memory? Is _before_backward ever called for it?"
IN_PARTS = {
    "SIGSEGV": "Look at: whose memory is shard's, after free()?",
    _OUT_OF_BOUNDS: "Look at: how many bytes has flat's storage, and how many does it need?",
}
IN_UNITS = {
    "SIGSEGV": _LOOK_AT_READERS,
    _OUT_OF_BOUNDS: _LOOK_AT_READERS,
    "SIGABRT": "Look at: what does each rank launch next?",
    "CheckpointException": "Look at: does each tensor say where it belongs?",
}

# -- 9.1 to 9.3

ShardedParameters.check("start", world_sizes=(1, 2, 3))(unit_shards.parts_of_the_first_ranks_values)
ShardedParameters.check("gather", world_sizes=(1, 3, 4))(unit_shards.gather_puts_values_in_place)
ShardedParameters.check("windows", world_sizes=(1, 2))(unit_shards.backward_finds_its_windows)
ShardedParameters.check("memory", world_sizes=(4,))(unit_shards.only_a_part_has_memory)

Unit.check("states", world_sizes=(1,))(unit_states.states_follow_the_table)
Unit.check("parts", world_sizes=(1,))(unit_states.parts_are_told_once)

owned_parameters.check("owners", world_sizes=(1,))(unit_owners.each_has_one_owner)
owned_parameters.check("strangers", world_sizes=(1,))(unit_owners.strangers_are_refused)

# -- 9.4

GathersForForward.check("values")(forward.outputs_equal_one_process)
GathersForForward.check("parameters", world_sizes=(1, 3))(forward.parameters_are_parts)
GathersForForward.check("wire", world_sizes=(2, 4))(forward.each_unit_is_gathered_once)
GathersForForward.check("memory", world_sizes=(4,))(forward.units_come_and_go)
GathersForForward.check("states", world_sizes=(1, 2))(states.forward_leaves_what_backward_needs)


# -- 9.5

WITHOUT = {"prefetch": 0}  # so that a step before prefetching and the finished piece are tried alike


@ReducesGradients.check("values")
def training_equals_one_process(attempt: Attempt) -> None:
    some = {1: 2, 2: len(AWKWARD), 3: 2, 4: 2}[attempt.world_size]
    for number, model in enumerate(attempt.random.sample(AWKWARD, some)):
        options = WITHOUT | {"reshard_after_forward": attempt.random.random() < 0.7}
        train_and_judge(attempt, UnitPlan(model, ("AdamW", "SGD", "Hiker")[number % 3], options=options))


@ReducesGradients.check("unused on one rank", world_sizes=(2, 4))
def a_parameter_may_be_unused_somewhere(attempt: Attempt) -> None:
    for model in ("Roads", "Spare"):
        train_and_judge(attempt, UnitPlan(model, options=WITHOUT))
    backward.a_batch_may_be_skipped(attempt)


@ReducesGradients.check("accumulation", world_sizes=(1, 3))
def micro_batches_add_up(attempt: Attempt) -> None:
    for finish_each in (True, False):
        train_and_judge(attempt, UnitPlan("Tied", micro_batches=3, finish_each=finish_each, options=WITHOUT))


@ReducesGradients.check("checkpoints", world_sizes=(1, 2))
def blocks_may_be_computed_again(attempt: Attempt) -> None:
    for model in ("Checkpointed", "Recomputed"):
        train_and_judge(attempt, UnitPlan(model, "AdamW", options=WITHOUT))
        wire.every_unit_travels(attempt, [UnitPlan(model, steps=2, options=WITHOUT)])


ReducesGradients.check("several forwards", world_sizes=(1, 3))(backward.two_forwards_may_share_a_backward)
ReducesGradients.check("second backward", world_sizes=(1, 2))(backward.a_second_backward_is_refused)


@ReducesGradients.check("wire", world_sizes=(2, 4))
def parameters_travel_twice_and_gradients_once(attempt: Attempt) -> None:
    stays = WITHOUT | {"reshard_after_forward": False}
    plans = [UnitPlan(model, steps=2, options=WITHOUT) for model in ("Blocks", "Frozen", "Mixed")]
    plans += [UnitPlan(model, steps=1, options=WITHOUT) for model in ("Few", "Whole", "Tied")]
    plans.append(UnitPlan("Blocks", steps=1, options=stays))
    plans.append(UnitPlan("Blocks", steps=1, options=WITHOUT, micro_batches=2, finish_each=False))
    wire.every_unit_travels(attempt, plans)


@ReducesGradients.check("memory", world_sizes=(4,))
def only_what_computes_is_here(attempt: Attempt) -> None:
    judge_memory(attempt, UnitPlan("Deep", dtype=torch.float32, options=WITHOUT))


# -- 9.6

LooksAhead.check("order", world_sizes=(2, 4))(order.the_next_unit_travels_meanwhile)
LooksAhead.check("without", world_sizes=(2,))(order.nothing_travels_ahead)


@LooksAhead.check("values", world_sizes=(2, 3))
def looking_ahead_changes_no_value(attempt: Attempt) -> None:
    models = ("Turns", "Twice", "Nested", "Roads", "Recomputed", "Frozen", "Tied")
    for model in models if attempt.world_size == 2 else attempt.random.sample(models, 2):
        train_and_judge(attempt, UnitPlan(model, "AdamW", options={"prefetch": attempt.random.choice((1, 2))}))


@LooksAhead.check("wire", world_sizes=(2,))
def looking_ahead_sends_no_more(attempt: Attempt) -> None:
    wire.nothing_travels_in_vain(attempt)
    models = ("Blocks", "Frozen", "Recomputed", "Backwards")
    plans = [UnitPlan(model, steps=3, options={"prefetch": 2}) for model in models]
    wire.every_unit_travels(attempt, [*plans, UnitPlan("Blocks", steps=3, options={"reshard_after_forward": False})])


@LooksAhead.check("memory", world_sizes=(4,))
def one_unit_more_is_here(attempt: Attempt) -> None:
    """In bfloat16: what is gathered is half as large."""
    judge_memory(attempt, UnitPlan("Deep", dtype=torch.float32, options={"compute_dtype": torch.bfloat16}))


# -- 9.7


@ZeRO3.check("values")
def training_with_everything(attempt: Attempt) -> None:
    for model in attempt.random.sample((*AWKWARD, "Roads", "Checkpointed"), 1):
        options = {"reshard_after_forward": attempt.random.random() < 0.5, "prefetch": attempt.random.randrange(3)}
        train_and_judge(attempt, UnitPlan(model, attempt.random.choice(("AdamW", "Adam")), options=options))


@ZeRO3.check("clip", world_sizes=(1, 2, 3))
def clipping_equals_one_process(attempt: Attempt) -> None:
    models = ("Tied", "Frozen", "Mixed", "Few")
    for model in models if attempt.world_size == 2 else attempt.random.sample(models, 1):
        train_and_judge(attempt, UnitPlan(model, steps=3, max_norm=0.05))
    train_and_judge(attempt, UnitPlan("Blocks", steps=2, max_norm=100.0))
    wire.one_number_more_travels(attempt)


@ZeRO3.check("group", world_sizes=(3, 4))
def it_stays_inside_its_group(attempt: Attempt) -> None:
    plan = UnitPlan("Frozen", steps=3, in_subgroup=True, max_norm=0.05)
    for rank, result in train_and_judge(attempt, plan).items():
        for name, value in result["steps"][-1]["state"].items():
            if name not in result["whole"] or not torch.equal(result["whole"][name], value):
                said = f"{called_alone(attempt)}, {plan}: in full_state_dict(), {name} is not what is computed with"
                raise Wrong({rank: said}, "Look at: whose parts are put together?")


@ZeRO3.check("bf16", world_sizes=(2, 4))
def it_computes_in_another_dtype(attempt: Attempt) -> None:
    """Values are told in float32, which a float64 model may compute with: bfloat16 has too few digits for that."""
    wire.bf16_halves_what_travels(attempt)
    if attempt.world_size == 2:
        train_and_judge(attempt, UnitPlan("Frozen", steps=3, options={"compute_dtype": torch.float32}))


ZeRO3.check("whole state", world_sizes=(1, 2, 4))(state.it_is_a_plain_state)
ZeRO3.check("another world size", world_sizes=(1, 3))(state.any_number_of_ranks_takes_it_over)
ZeRO3.check("foreign state", world_sizes=(2,))(state.foreign_states_are_refused)
ZeRO3.check("sharded state", world_sizes=(4,))(saved.other_ranks_go_on)
ZeRO3.check("a module", world_sizes=(2,))(lives.it_is_like_its_module)
ZeRO3.check("copies", world_sizes=(1, 3))(lives.a_copy_has_a_life_of_its_own)

give_hints(IN_PARTS, ShardedParameters)
give_hints(IN_UNITS, GathersForForward, ReducesGradients, LooksAhead, ZeRO3)
