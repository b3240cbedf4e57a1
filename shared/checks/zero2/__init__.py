"""Checks for chapter 08: gradients that live only until their reduce-scatter, and a sharded optimizer state.

The checks never use elapsed time. They judge the bytes held and sent, and which bucket was launched when.
"""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import where_it_raises
from shared.checks.engine.sharded import clip
from shared.checks.engine.sharded.steps import judge_bf16
from shared.checks.engine.sharded.training import HINT_ON_SHARDS
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.models import awkward
from shared.checks.zero2 import bucket_memory, loops, memory, order, sharded_bucket
from shared.checks.zero2.training import TINY_CAP_MB, WrapperPlan, probe_zero2, train_wrapper_and_judge

ShardedBucket = Exercise("8.1", "ShardedBucket")
ZeRO2 = Exercise("8.2", "ZeRO2")
every_loop = Exercise("8.3", "ZeRO2")

AWKWARD = ("Tied", "Frozen", "Unused", "TwoBranches", "Scalar", "Buffered", "Mixed", "Crowd")
AWKWARD += awkward.HAVE_MODES
_HINT_ON_KEPT = (
    "Hint: where are the gradients of the micro-batches inside no_sync() when the last backward adds its own?"
)
_HINT_ON_SENT = "Hint: what does shard.grad already contain when the mean of another micro-batch arrives?"
CLIPS = clip.CLIPS
_HINT_ON_DTYPE = (
    "shard.grad must have the dtype of the shard, so do not set grad_dtype. "
    "Hint: which dtype does the handle's wait() return here?"
)
WRONG_DTYPE = {  # the words of older and newer versions of torch
    "assigned grad has data of a different type": _HINT_ON_DTYPE,
    "assign a gradient with dtype": _HINT_ON_DTYPE,
}

# -- 8.1


ShardedBucket.check("plain model", world_sizes=(2,))(sharded_bucket.a_plain_shard_gets_its_mean)


@ShardedBucket.check("awkward models")
@where_it_raises(WRONG_DTYPE)
def gradients_of_awkward_models_become_means(attempt: Attempt) -> None:
    bucket_memory.no_gradient_counts_as_zeros(attempt)
    sharded_bucket.each_shard_gets_its_mean(attempt)


ShardedBucket.check("wire", world_sizes=(2, 3))(sharded_bucket.one_reduce_scatter_per_launch)
ShardedBucket.check("previous", world_sizes=(2,))(sharded_bucket.the_previous_bucket_is_waited_for)
ShardedBucket.check("at once", world_sizes=(2, 3))(sharded_bucket.launch_returns_at_once)
ShardedBucket.check("memory", world_sizes=(4,))(bucket_memory.only_a_shard_stays)
ShardedBucket.check("rejections", world_sizes=(1,))(bucket_memory.gradients_with_a_graph_are_rejected)


# -- 8.2


@ZeRO2.check("values", world_sizes=(2,))
def a_plain_model_trains_as_in_one_process(attempt: Attempt) -> None:
    train_wrapper_and_judge(attempt, WrapperPlan("Plain", "SGD"))
    train_wrapper_and_judge(attempt, WrapperPlan("Plain", "AdamW", bucket_cap_mb=25.0))


@ZeRO2.check("same start", world_sizes=(2, 3))
def ranks_start_equal(attempt: Attempt) -> None:
    for model in ("Frozen", "Buffered", "Mixed"):
        found = train_wrapper_and_judge(attempt, WrapperPlan(model, steps=0))
        _judge_addresses(found, model)
        for rank, result in found.items():
            for name, expected in found[0]["start"].items():
                if not torch.equal(result["start"][name], expected):
                    evidence = f"{awkward.describe(model)}: after wrapping, {name} differs from rank 0's"
                    raise Wrong({rank: evidence}, "Hint: what does a module hold besides trainable parameters?")


def _judge_addresses(found: dict[int, dict], model: str) -> None:
    for rank, result in found.items():
        if result["elsewhere"]:
            name = result["elsewhere"][0]
            evidence = f"{awkward.describe(model)}: {name} is not a view of the flat parameter of its bucket"
            hint = (
                "The optimizer updates memory that no bucket refers to. Hint: how many times are parameters flattened?"
            )
            raise Wrong({rank: evidence}, hint)


@ZeRO2.check("awkward models")
def awkward_models_train_as_in_one_process(attempt: Attempt) -> None:
    some = {1: 2, 2: len(AWKWARD), 3: 3, 4: 3}[attempt.world_size]
    for number, model in enumerate(attempt.random.sample(AWKWARD, some)):
        train_wrapper_and_judge(attempt, WrapperPlan(model, ("AdamW", "SGD", "UnknownOptimizer")[number % 3]))


ZeRO2.check("wire", world_sizes=(2, 3, 4))(memory.each_backward_and_each_step_send_once)
ZeRO2.check("launch order", world_sizes=(2, 3))(order.every_rank_launches_in_one_order)
ZeRO2.check("overlap", world_sizes=(2, 4))(order.full_buckets_are_launched_during_backward)
ZeRO2.check("backward continues", world_sizes=(2, 3))(order.backward_goes_on_while_a_bucket_is_in_flight)
ZeRO2.check("memory", world_sizes=(2, 4))(memory.each_rank_holds_its_shards)
ZeRO2.check("peak", world_sizes=(2, 4))(memory.backward_holds_three_buckets)


@ZeRO2.check("group", world_sizes=(3, 4))
def it_stays_inside_its_group(attempt: Attempt) -> None:
    train_wrapper_and_judge(attempt, WrapperPlan("Tied", in_subgroup=True))
    train_wrapper_and_judge(attempt, WrapperPlan("Buffered", "SGD", in_subgroup=True))


@ZeRO2.check("bf16", world_sizes=(2, 4))
def bf16_stays_bf16(attempt: Attempt) -> None:
    judge_bf16(attempt, WrapperPlan("TwoBranches", "SGD", steps=2, dtype=torch.bfloat16), probe_zero2)


@ZeRO2.check("wrapping", world_sizes=(2,))
def it_behaves_like_its_module(attempt: Attempt) -> None:
    options = {"optimizer_cls": torch.optim.SGD, "lr": 0.1, "bucket_cap_mb": TINY_CAP_MB}
    judge_wrapping(attempt, options, overlaps=True)


# -- 8.3


@every_loop.check("accumulation", world_sizes=(1, 2, 3))
def both_ways_of_accumulating_are_equal(attempt: Attempt) -> None:
    for sends_each in (False, True):
        for model in ("TwoBranches", "Tied"):
            try:
                plan = WrapperPlan(model, "SGD", micro_batches=3, sends_each=sends_each)
                train_wrapper_and_judge(attempt, plan)
            except Wrong as wrong:
                if wrong.hint == HINT_ON_SHARDS:
                    wrong.hint = _HINT_ON_SENT if sends_each else _HINT_ON_KEPT
                raise


@every_loop.check("loops", world_sizes=(1, 3))
def loops_of_every_kind(attempt: Attempt) -> None:
    without = WrapperPlan("Unused", "AdamW", finishes=False, zero_grad=("optimizer", "keeping"))
    train_wrapper_and_judge(attempt, without)
    train_wrapper_and_judge(attempt, WrapperPlan("TwoBranches", "SGD", micro_batches=2, finishes=False))
    if attempt.world_size > 1:
        loops.every_step_synchronizes(attempt)
    loops.every_loop_trains(attempt)
    if attempt.world_size > 1:
        idle = attempt.random.randrange(1, 5), attempt.random.randrange(attempt.world_size)
        finishes = attempt.random.random() < 0.5
        train_wrapper_and_judge(attempt, WrapperPlan("Plain", idle=idle, finishes=finishes))


every_loop.check("sent once", world_sizes=(2, 3))(memory.a_step_that_finishes_sends_once)
every_loop.check("micro-batches", world_sizes=(2, 4))(memory.micro_batches_send_or_are_silent)


@every_loop.check("clipping", world_sizes=(1, 2, 3))
@where_it_raises({"must be Tensor, not NoneType": "Hint: which call sets shard.grad, and has it been made by then?"})
def clipping_equals_one_process(attempt: Attempt) -> None:
    for plan in (
        WrapperPlan("TwoBranches", "SGD", steps=3, max_norm=CLIPS),
        WrapperPlan("Mixed", "AdamW", steps=2, max_norm=CLIPS, micro_batches=2, sends_each=True),
        WrapperPlan("Plain", "SGD", steps=2, max_norm=clip.LEAVES, finishes=False),
    ):
        clip.clip_and_judge(attempt, plan, probe_zero2)
    if attempt.world_size > 1:
        memory.clipping_sends_one_more_element(attempt)
    if attempt.world_size > 2:
        in_subgroup = WrapperPlan("Frozen", "SGD", steps=2, max_norm=CLIPS, in_subgroup=True)
        clip.clip_and_judge(attempt, in_subgroup, probe_zero2)


every_loop.check("rejections", world_sizes=(1, 2))(loops.a_graph_is_rejected)
every_loop.check("copies", world_sizes=(1, 2))(loops.copies_and_originals_train_independently)
every_loop.check("state", world_sizes=(1, 3))(
    where_it_raises(
        {"no attribute 'optimizer'": "Hint: which optimizer does a scheduler write to, and whose state is saved?"}
    )(loops.both_states_are_plain)
)
