"""Checks for chapter 07: an optimizer whose state is sharded over the ranks."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import begin_at, give_hints, where_it_raises
from shared.checks.engine.sharded import clip, flat_layout
from shared.checks.engine.sharded import state as sharded_state
from shared.checks.engine.sharded import steps as sharded_steps
from shared.checks.engine.sharded.plan import Plan, layout_of
from shared.checks.engine.sharded.training import train_and_judge
from shared.checks.engine.sharded.wire import judge_rounds, reject_messages
from shared.checks.zero1 import flat_gradients, memory, trainings
from shared.checks.zero1.memory import judge_memory
from shared.checks.zero1.on_shards import on_shards

FlatParameter = Exercise("7.1", "FlatParameter")
FlatGradients = Exercise("7.2", "FlatGradients")
ShardedOptimizer = Exercise("7.3", "ShardedOptimizer")
ZeRO1 = Exercise("7.4", "ZeRO1", first="values")
clip_grad_norm_ = Exercise("7.5", "ZeRO1")
state_dict = Exercise("7.6", "ZeRO1")

AWKWARD = ("Tied", "Frozen", "Unused", "TwoBranches", "Scalar", "Mixed", "Crowd")

# -- 7.1 and 7.2

FlatParameter.check("layout", world_sizes=(1, 2, 3))(flat_layout.parameters_lie_side_by_side)
FlatParameter.check("views", world_sizes=(1, 2))(flat_layout.the_model_computes_with_them)
FlatParameter.check("all-gather", world_sizes=(1, 3, 4))(flat_layout.every_shard_is_gathered)
FlatParameter.check("at once", world_sizes=(2, 3))(flat_layout.the_launch_returns_at_once)
FlatParameter.check("memory", world_sizes=(4,))(flat_layout.no_copy_stays)
for each in FlatParameter.checks:
    each.judge = flat_layout.hint_at_wait(each.judge)
give_hints({"is being modified": "Hint: should autograd record this copy?"}, FlatParameter)

FlatGradients.check("slices", world_sizes=(2,))(flat_gradients.gradients_are_slices_of_zeros)
FlatGradients.check("plain", world_sizes=(2,))(flat_gradients.a_plain_model_has_its_mean)
FlatGradients.check("values")(flat_gradients.each_rank_gets_its_shard_of_the_mean)
FlatGradients.check("late gradients", world_sizes=(2,))(flat_gradients.later_gradients_are_rejected)
FlatGradients.check("wire", world_sizes=(2, 3))(flat_gradients.each_gradient_is_sent_once)
FlatGradients.check("memory", world_sizes=(4,))(flat_gradients.gradients_are_held_once)


# -- 7.3

starts_equal = on_shards(trainings.ranks_start_equal)
has_settings = on_shards(trainings.each_group_has_settings_of_its_own)
ShardedOptimizer.check("plain", world_sizes=(2,))(on_shards(trainings.a_plain_model_trains_as_in_one_process))
ShardedOptimizer.check("same start", world_sizes=(2, 3))(starts_equal)
ShardedOptimizer.check("settings", world_sizes=(1, 3))(has_settings)
ShardedOptimizer.check("more parameters", world_sizes=(2, 4))(
    begin_at(starts_equal, "same start")(
        begin_at(has_settings, "settings")(on_shards(trainings.parameters_may_join_later))
    )
)
ShardedOptimizer.check("wire", world_sizes=(3,))(on_shards(trainings.each_parameter_is_broadcast_once))
ShardedOptimizer.check("group", world_sizes=(3,))(
    begin_at(starts_equal, "same start")(on_shards(trainings.it_stays_inside_its_group))
)


# -- 7.4

ZeRO1.check("values", world_sizes=(2,))(trainings.a_plain_model_trains_as_in_one_process)
ZeRO1.check("same start", world_sizes=(2, 3))(trainings.ranks_start_equal)


@ZeRO1.check("awkward models")
def awkward_models_train_as_in_one_process(attempt: Attempt) -> None:
    some = {1: 2, 2: len(AWKWARD), 3: 3, 4: 3}[attempt.world_size]
    models = attempt.random.sample(AWKWARD, some)
    for number, model in enumerate(models):
        train_and_judge(attempt, Plan(model, ("AdamW", "SGD", "UnknownOptimizer")[number % 3]))


ZeRO1.check("settings", world_sizes=(1, 3))(trainings.each_group_has_settings_of_its_own)
ZeRO1.check("more parameters", world_sizes=(2, 4))(trainings.parameters_may_join_later)


@ZeRO1.check("loops", world_sizes=(1, 3))
@where_it_raises({"step(closure)": "Hint: which line of step() runs first if there is a closure?"})
def loops_of_every_kind(attempt: Attempt) -> None:
    train_and_judge(attempt, Plan("TwoBranches", "AdamW", zero_grad=("model", "optimizer", "keeping")))
    train_and_judge(attempt, Plan("Mixed", "SGD", zero_grad=("model",)))
    train_and_judge(attempt, Plan("Tied", "AdamW", micro_batches=3))
    for model in ("Unused", "Normed"):
        train_and_judge(attempt, Plan(model, "SGD", closure=True))
    if attempt.world_size > 1:
        idle = attempt.random.randrange(1, 5), attempt.random.randrange(attempt.world_size)
        train_and_judge(attempt, Plan("Plain", idle=idle, zero_grad=("model",)))


ZeRO1.check("discarded mean", world_sizes=(1, 3))(clip.means_may_be_thrown_away)
ZeRO1.check("hooks", world_sizes=(2,))(sharded_steps.hooks_run_once)
ZeRO1.check("stale gradients", world_sizes=(1, 2))(sharded_steps.used_up_gradients_are_rejected)


@ZeRO1.check("wire", world_sizes=(3, 4))
def every_element_is_sent_twice(attempt: Attempt) -> None:
    for plan in (Plan("Frozen", steps=3), Plan("Mixed", steps=3, split=True), Plan("Crowd", "Adam", steps=3)):
        found, flats = train_and_judge(attempt, plan), layout_of(plan)
        trainings.judge_building(found, plan)
        for number in range(plan.steps):
            steps = {rank: result["steps"][number] for rank, result in found.items()}
            idle = {rank: step["idle"] for rank, step in steps.items()}
            reject_messages(idle, f"{plan}, in zero_grad() and backward()")
            stepping = {rank: step["step"] for rank, step in steps.items()}
            judge_rounds(stepping, flats, 2, f"{plan}, step {number + 1}")


@ZeRO1.check("memory", world_sizes=(2, 4))
def the_state_is_sharded(attempt: Attempt) -> None:
    judge_memory(attempt, torch.float32, with_masters=False, with_peak=attempt.world_size == 4)


@ZeRO1.check("masters", world_sizes=(2, 4))
def master_weights_are_sharded(attempt: Attempt) -> None:
    judge_memory(attempt, torch.bfloat16, with_masters=True, with_peak=False)


ZeRO1.check("group", world_sizes=(3, 4))(trainings.it_stays_inside_its_group)
ZeRO1.check("bf16", world_sizes=(2, 4))(sharded_steps.bf16_stays_bf16)


give_hints(
    {
        "step() has already used these gradients": (
            "But zero_grad() was called after that step. Hint: which attribute has been True since then, and which "
            "method must change it?"
        )
    },
    ZeRO1,
)


# -- 7.5

clip_grad_norm_.check("clipping")(clip.clipping_equals_one_process)
clip_grad_norm_.check("below the bound", world_sizes=(1, 2))(clip.small_gradients_stay)
clip_grad_norm_.check("skipped step", world_sizes=(1, 3))(clip.gradients_may_be_thrown_away)
clip_grad_norm_.check("clipping wire", world_sizes=(2, 3))(clip.one_more_element_is_sent)
clip_grad_norm_.check("large gradients", world_sizes=(2,))(clip.large_gradients_do_not_overflow)
clip_grad_norm_.check("all frozen", world_sizes=(2,))(clip.without_gradients_the_norm_is_zero)
clip_grad_norm_.check("clipping group", world_sizes=(3, 4))(clip.it_stays_inside_its_group)


# -- 7.6

state_dict.check("state")(sharded_state.it_is_a_plain_state)
state_dict.check("before the first step", world_sizes=(1, 3))(sharded_state.before_the_first_step)
state_dict.check("to one rank", world_sizes=(2, 3, 4))(sharded_state.one_rank_alone_may_have_it)
state_dict.check("other ranks' memory", world_sizes=(4,))(sharded_state.nobody_else_holds_it)
state_dict.check("another world size", world_sizes=(4,))(sharded_state.another_number_of_ranks_goes_on)
state_dict.check("plain state", world_sizes=(1, 2, 4))(sharded_state.a_plain_state_is_taken_over)
state_dict.check("foreign state", world_sizes=(1, 2))(sharded_state.foreign_states_are_rejected)
state_dict.check("shard only", world_sizes=(4,))(memory.no_more_than_its_shard_is_held)
state_dict.check("loaded masters", world_sizes=(2, 4))(memory.masters_come_back)

give_hints(
    {
        "'NoneType' object has no attribute": "Hint: which of the values may be None?",
        "grad_dtype": "Hint: which dtype does the flat tensor have, and which one does the entry have?",
    },
    state_dict,
)
