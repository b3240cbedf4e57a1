"""Checks for chapter 08: gradients that live from backward to their message, and an optimizer on one N-th.

Nothing is judged by how long it took. Bytes are, held and sent, and which bucket had left when.
"""

import torch

from shared.checks.engine.framework import Attempt, Exercise, Wrong
from shared.checks.engine.hints import where_it_raises
from shared.checks.engine.sharded import clip
from shared.checks.engine.sharded.steps import judge_bf16
from shared.checks.engine.sharded.training import LOOK_AT_PARTS
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.models import awkward
from shared.checks.zero2 import (
    lives,
    loops,
    memory,
    order,
    travelling_gradients,
    travelling_memory,
    travelling_sum,
    wire,
)
from shared.checks.zero2.training import TINY_CAP_MB, Travel, probe_zero2, travel_and_judge

begin_reduce_scatter = Exercise("8.1", "begin_reduce_scatter", optional=True)
TravellingGradients = Exercise("8.2", "TravellingGradients", optional=True)
ZeRO2 = Exercise("8.3", "ZeRO2")

AWKWARD = ("Plain", "Tied", "Frozen", "Unused", "TwoRoads", "Scalar", "Buffered", "Strided", "Mixed", "Crowd")
AWKWARD += awkward.HAVE_MODES
_LOOK_AT_KEPT = "Look at: where are the gradients that no_sync() has kept, when the last backward adds its own?"
_LOOK_AT_SENT = "Look at: what is in the shard's gradient by then, when the mean of another micro-batch arrives?"
CLIPS = clip.CLIPS
UNFINISHED = {"while the one before is under way": "Look at: who finishes the synchronisation, if the loop does not?"}

# -- 8.1 and 8.2

begin_reduce_scatter.check("values")(travelling_sum.each_rank_gets_its_part_of_the_sum)
begin_reduce_scatter.check("at once", world_sizes=(2, 3))(travelling_sum.the_call_comes_back_at_once)
begin_reduce_scatter.check("wire", world_sizes=(3, 4))(travelling_sum.one_part_of_flat_is_sent_to_each)
begin_reduce_scatter.check("memory", world_sizes=(4,))(travelling_sum.there_is_little_room_for_what_arrives)


@TravellingGradients.check("values")
def gradients_become_means(attempt: Attempt) -> None:
    travelling_gradients.no_gradient_counts_as_zeros(attempt)
    travelling_gradients.each_shard_gets_its_part_of_the_mean(attempt)


TravellingGradients.check("wire", world_sizes=(2, 3))(travelling_gradients.one_message_per_launch)
TravellingGradients.check("before", world_sizes=(2,))(travelling_gradients.the_one_before_has_arrived)
TravellingGradients.check("at once", world_sizes=(2, 3))(travelling_gradients.launch_waits_for_nobody)
TravellingGradients.check("memory", world_sizes=(4,))(travelling_memory.nothing_but_a_part_stays)
TravellingGradients.check("refusals", world_sizes=(1,))(travelling_gradients.gradients_with_a_graph_are_refused)


# -- 8.3


@ZeRO2.check("same start", world_sizes=(2, 3))
def ranks_start_equal(attempt: Attempt) -> None:
    for model in ("Frozen", "Buffered", "Mixed"):
        found = travel_and_judge(attempt, Travel(model, steps=0))
        _judge_homes(found, model)
        for rank, result in found.items():
            for name, want in found[0]["start"].items():
                if not torch.equal(result["start"][name], want):
                    said = f"{awkward.said(model)}: when it is wrapped, {name} is not what rank 0 has"
                    raise Wrong({rank: said}, "Look at: what else than trainable parameters does a module hold?")


def _judge_homes(found: dict[int, dict], model: str) -> None:
    for rank, result in found.items():
        if result["elsewhere"]:
            name = result["elsewhere"][0]
            said = f"{awkward.said(model)}: {name} does not lie in the flat tensor of its bucket any more"
            hint = "The optimizer steps parameters that no bucket fills. Look at: who has laid them out, and how often?"
            raise Wrong({rank: said}, hint)


@ZeRO2.check("values")
def training_equals_one_process(attempt: Attempt) -> None:
    some = {1: 2, 2: len(AWKWARD), 3: 3, 4: 3}[attempt.world_size]
    for number, model in enumerate(attempt.random.sample(AWKWARD, some)):
        travel_and_judge(attempt, Travel(model, ("AdamW", "SGD", "Hiker")[number % 3]))
    travel_and_judge(attempt, Travel("Plain", "SGD", bucket_cap_mb=25.0))


@ZeRO2.check("accumulation", world_sizes=(1, 2, 3))
def both_ways_of_accumulating_are_equal(attempt: Attempt) -> None:
    for sends_each in (False, True):
        for model in ("TwoRoads", "Tied"):
            try:
                travel_and_judge(attempt, Travel(model, "SGD", micro_batches=3, sends_each=sends_each))
            except Wrong as wrong:
                if wrong.hint == LOOK_AT_PARTS:
                    wrong.hint = _LOOK_AT_SENT if sends_each else _LOOK_AT_KEPT
                raise


@ZeRO2.check("loops", world_sizes=(1, 3))
@where_it_raises(UNFINISHED)
def loops_of_every_kind(attempt: Attempt) -> None:
    travel_and_judge(attempt, Travel("Unused", "AdamW", finishes=False, zero_grad=("optimizer", "keeping")))
    travel_and_judge(attempt, Travel("TwoRoads", "SGD", micro_batches=2, finishes=False))
    loops.every_loop_trains(attempt)
    if attempt.world_size > 1:
        idle = attempt.random.randrange(1, 5), attempt.random.randrange(attempt.world_size)
        travel_and_judge(attempt, Travel("Plain", idle=idle, finishes=attempt.random.random() < 0.5))


@ZeRO2.check("clip", world_sizes=(1, 2, 3))
def clipping_equals_one_process(attempt: Attempt) -> None:
    for plan in (
        Travel("TwoRoads", "SGD", steps=3, max_norm=CLIPS),
        Travel("Mixed", "AdamW", steps=2, max_norm=CLIPS, micro_batches=2, sends_each=True),
        Travel("Plain", "SGD", steps=2, max_norm=clip.LEAVES, finishes=False),
    ):
        clip.clip_and_judge(attempt, plan, probe_zero2)
    if attempt.world_size > 1:
        wire.clipping_sends_one_number_more(attempt)


ZeRO2.check("wire", world_sizes=(2, 3, 4))(where_it_raises(UNFINISHED)(wire.each_backward_sends_once))
ZeRO2.check("micro-batches", world_sizes=(2, 4))(wire.micro_batches_send_or_are_silent)
ZeRO2.check("launch order", world_sizes=(2, 3))(order.every_rank_launches_in_one_order)
ZeRO2.check("overlap", world_sizes=(2, 4))(order.full_buckets_leave_while_backward_goes_on)
ZeRO2.check("goes on", world_sizes=(2, 3))(order.backward_goes_on_while_a_bucket_travels)
ZeRO2.check("refusals", world_sizes=(1, 2))(lives.what_cannot_be_right_is_refused)
ZeRO2.check("memory", world_sizes=(2, 4))(memory.each_rank_holds_its_part)
ZeRO2.check("peak", world_sizes=(2, 4))(memory.backward_holds_three_buckets)
ZeRO2.check("lives", world_sizes=(1, 2))(lives.copies_and_originals_live_their_own_lives)
ZeRO2.check("state", world_sizes=(1, 3))(
    where_it_raises({"no attribute 'optimizer'": "Look at: to what would a scheduler write, and what would be saved?"})(
        lives.both_states_are_plain
    )
)


@ZeRO2.check("group", world_sizes=(3, 4))
def it_stays_inside_its_group(attempt: Attempt) -> None:
    travel_and_judge(attempt, Travel("TwoRoads", in_subgroup=True))
    travel_and_judge(attempt, Travel("Buffered", "SGD", in_subgroup=True))
    clip.clip_and_judge(attempt, Travel("Frozen", "SGD", steps=2, max_norm=CLIPS, in_subgroup=True), probe_zero2)


@ZeRO2.check("bf16", world_sizes=(2, 4))
def bf16_stays_bf16(attempt: Attempt) -> None:
    judge_bf16(attempt, Travel("TwoRoads", "SGD", steps=2, dtype=torch.bfloat16), probe_zero2)


@ZeRO2.check("wraps", world_sizes=(2,))
def it_behaves_like_its_module(attempt: Attempt) -> None:
    options = {"optimizer_cls": torch.optim.SGD, "lr": 0.1, "bucket_cap_mb": TINY_CAP_MB}
    judge_wrapping(attempt, options, overlaps=True)
