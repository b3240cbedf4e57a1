"""Checks for chapter 08: gradients that live only until their reduce-scatter, and a sharded optimizer state.

The checks never use elapsed time. They judge the bytes held and sent, and which bucket was launched when.
"""

from dataclasses import replace

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import expect
from shared.checks.engine.framework import WORLD_SIZES, Exercise
from shared.checks.engine.hints import replacing_hints, where_it_raises
from shared.checks.engine.sharded.clip import CLIPS, LEAVES, clip_and_judge, one_more_element_is_sent
from shared.checks.engine.sharded.plan import RunReport
from shared.checks.engine.sharded.steps import judge_bf16
from shared.checks.engine.sharded.training import HINT_ON_SHARDS, judge_building, sends, starts_equal, trains
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.models import awkward
from shared.checks.zero2 import loops, memory, order, sharded_bucket
from shared.checks.zero2.training import TINY_CAP_MB, WrapperPlan

ShardedBucket = Exercise("8.1", "ShardedBucket")
ZeRO2 = Exercise("8.2", "ZeRO2")
every_loop = Exercise("8.3", "ZeRO2")

AWKWARD = ("Tied", "Frozen", "Unused", "TwoBranches", "Scalar", "Buffered", "Mixed", "Crowd", *awkward.HAVE_MODES)

# -- 8.1

ShardedBucket.table(
    ("plain model", (2,), sharded_bucket.a_plain_shard_gets_its_mean),
    ("awkward models", WORLD_SIZES, sharded_bucket.gradients_of_awkward_models_become_means),
    ("wire", (2, 3), sharded_bucket.one_reduce_scatter_per_launch),
    ("previous", (2,), sharded_bucket.the_previous_bucket_is_waited_for),
    ("at once", (2, 3), sharded_bucket.launch_returns_at_once),
    ("memory", (4,), sharded_bucket.only_a_shard_stays),
    ("rejections", (1,), sharded_bucket.gradients_with_a_graph_are_rejected),
)

# -- 8.2


def parameters_are_views(found: dict[int, RunReport], plan: WrapperPlan) -> None:
    evidence = f"{awkward.describe(plan.model)}: not all parameters are views of the flat parameters of their buckets"
    hint = "The optimizer updates memory that no bucket refers to. Hint: how many times are parameters flattened?"
    expect(found, lambda own: not own.elsewhere, lambda own: f"{evidence}: {own.elsewhere[0]}", hint)


def awkward_models(attempt: Attempt) -> list[WrapperPlan]:
    models = attempt.random.sample(AWKWARD, {1: 2, 2: len(AWKWARD), 3: 3, 4: 3}[attempt.world_size])
    optimizers = ("AdamW", "SGD", "UnknownOptimizer")
    return [WrapperPlan(model, optimizers[number % 3]) for number, model in enumerate(models)]


def some_buckets(attempt: Attempt) -> list[WrapperPlan]:
    plans = [WrapperPlan("Frozen", "SGD"), WrapperPlan("Mixed"), WrapperPlan("Crowd")]
    plans.append(WrapperPlan("Tied", bucket_cap_mb=25.0))
    return [replace(plan, steps=2) for plan in attempt.random.sample(plans, 2)]


def bf16_stays_bf16(attempt: Attempt) -> None:
    judge_bf16(attempt, WrapperPlan("TwoBranches", "SGD", steps=2, dtype=torch.bfloat16))


def it_behaves_like_its_module(attempt: Attempt) -> None:
    judge_wrapping(attempt, order.SGD | {"bucket_cap_mb": TINY_CAP_MB}, overlaps=True)


GROUP = [WrapperPlan("Tied", in_subgroup=True), WrapperPlan("Buffered", "SGD", in_subgroup=True)]
ZeRO2.table(
    ("values", (2,), trains([WrapperPlan("Plain", "SGD"), WrapperPlan("Plain", "AdamW", bucket_cap_mb=25.0)])),
    (
        "same start",
        (2, 3),
        trains(
            [WrapperPlan(model, steps=0) for model in ("Frozen", "Buffered", "Mixed")],
            parameters_are_views,
            starts_equal,
        ),
    ),
    ("awkward models", WORLD_SIZES, trains(awkward_models)),
    (
        "wire",
        (2, 3, 4),
        trains(some_buckets, judge_building, sends({"zero_grad()": 0, "backward()": 1, "step()": 1})),
    ),
    ("launch order", (2, 3), order.every_rank_launches_in_one_order),
    ("overlap", (2, 4), order.full_buckets_are_launched_during_backward),
    ("backward continues", (2, 3), order.backward_goes_on_while_a_bucket_is_in_flight),
    ("memory", (2, 4), memory.each_rank_holds_its_shards),
    ("peak", (2, 4), memory.backward_holds_three_buckets),
    ("group", (3, 4), trains(GROUP)),
    ("bf16", (2, 4), bf16_stays_bf16),
    ("wrapping", (2,), it_behaves_like_its_module),
)

# -- 8.3

BATCHES = [WrapperPlan("Frozen", "SGD", steps=2, micro_batches=3, sends_each=each) for each in (True, False)]
_HINT_ON_KEPT = (
    "Hint: where are the gradients of the micro-batches inside no_sync() when the last backward adds its own?"
)
_HINT_ON_SENT = "Hint: what does shard.grad already contain when the mean of another micro-batch arrives?"


def both_ways_of_accumulating_are_equal(attempt: Attempt) -> None:
    for sends_each in (False, True):
        plans = [WrapperPlan(model, "SGD", micro_batches=3, sends_each=sends_each) for model in ("TwoBranches", "Tied")]
        with replacing_hints({HINT_ON_SHARDS: _HINT_ON_SENT if sends_each else _HINT_ON_KEPT}):
            trains(plans)(attempt)


def loops_of_every_kind(attempt: Attempt) -> None:
    without = WrapperPlan("Unused", "AdamW", finishes=False, zero_grad=("optimizer", "keeping"))
    trains([without, WrapperPlan("TwoBranches", "SGD", micro_batches=2, finishes=False)])(attempt)
    if attempt.world_size > 1:
        loops.every_step_synchronizes(attempt)
    loops.every_loop_trains(attempt)
    if attempt.world_size > 1:
        idle = attempt.random.randrange(1, 5), attempt.random.randrange(attempt.world_size)
        finishes = attempt.random.random() < 0.5
        trains([WrapperPlan("Plain", idle=idle, finishes=finishes)])(attempt)


def micro_batches_send_or_are_silent(attempt: Attempt) -> None:
    each, last = BATCHES
    trains([each], sends({"micro-batch 1": 1, "micro-batch 2": 1, "micro-batch 3": 1, "step()": 1}))(attempt)
    trains([last], sends({"no_sync()": 0, "micro-batch 3": 1, "step()": 1}))(attempt)


@where_it_raises({"must be Tensor, not NoneType": "Hint: which call sets shard.grad, and has it been made by then?"})
def clipping_equals_one_process(attempt: Attempt) -> None:
    for plan in (
        WrapperPlan("TwoBranches", "SGD", steps=3, max_norm=CLIPS),
        WrapperPlan("Mixed", "AdamW", steps=2, max_norm=CLIPS, micro_batches=2, sends_each=True),
        WrapperPlan("Plain", "SGD", steps=2, max_norm=LEAVES, finishes=False),
    ):
        clip_and_judge(attempt, plan)
    if attempt.world_size > 1:
        one_more_element_is_sent(attempt, [WrapperPlan("Frozen", "SGD", finishes=each) for each in (True, False)])
    if attempt.world_size > 2:
        clip_and_judge(attempt, WrapperPlan("Frozen", "SGD", steps=2, max_norm=CLIPS, in_subgroup=True))


every_loop.table(
    ("accumulation", (1, 2, 3), both_ways_of_accumulating_are_equal),
    ("loops", (1, 3), loops_of_every_kind),
    (
        "sent once",
        (2, 3),
        trains(
            [WrapperPlan("Plain", steps=2, finishes=finishes) for finishes in (True, False)],
            sends({"backward() and step()": 2}),
        ),
    ),
    ("micro-batches", (2, 4), micro_batches_send_or_are_silent),
    ("clipping", (1, 2, 3), clipping_equals_one_process),
    ("rejections", (1, 2), order.a_graph_is_rejected),
    ("copies", (1, 2), loops.copies_and_originals_train_independently),
    ("state", (1, 3), loops.both_states_are_plain),
)
