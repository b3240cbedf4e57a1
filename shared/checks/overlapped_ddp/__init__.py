"""Checks for chapter 04: gradient buckets whose all-reduces start while backward computes.

Nothing is judged by how long it took. What counts is order: which collectives a rank had launched when its backward
came to a layer, and whether its backward can end while another rank has launched nothing yet.
"""

import torch

from shared.checks.engine.buckets import describe_messages, judge_messages, messages_of, said_cap
from shared.checks.engine.compare import by_rank, describe_calls, judge_gradients
from shared.checks.engine.footprint import judge_footprint
from shared.checks.engine.framework import Attempt, Exercise, Wrong
from shared.checks.engine.latecomers import PATIENCE_S
from shared.checks.engine.overlap_probes import (
    Micro,
    probe_late,
    probe_lives,
    probe_memory,
    probe_order,
    probe_progress,
)
from shared.checks.engine.overlap_steps import draw_shares, judge_steps, mean_of
from shared.checks.engine.training import Draw, Training, judge_start, train, train_and_judge
from shared.checks.engine.volume import judge_state_bytes
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.models import awkward
from shared.checks.models.overlap import draw_sizes
from shared.checks.overlapped_ddp import accumulation, gradient_sync, launch_queue, refusals

LaunchQueue = Exercise("4.1", "LaunchQueue", optional=True)
GradientSync = Exercise("4.2", "GradientSync", optional=True)
OverlappedDDP = Exercise("4.3", "OverlappedDDP")
no_sync = Exercise("4.4", "OverlappedDDP")

TINY_CAP = {"bucket_cap_mb": 200 / 2**20}  # the awkward models have some 600 bytes
AWKWARD = ("Plain", "Tied", "Frozen", "Unused", "Scalar", "Buffered", "Strided", "Mixed", *awkward.HAVE_MODES)


# -- 4.1, 4.2, 4.4

LaunchQueue.check("order", world_sizes=(1,))(launch_queue.launched_in_order_and_early)
LaunchQueue.check("finish", world_sizes=(1,))(launch_queue.finish_completes_and_begins_anew)
GradientSync.check("backward", world_sizes=(1,))(gradient_sync.gradients_are_added_in_backward)
GradientSync.check("disabled", world_sizes=(1,))(gradient_sync.it_does_nothing_when_disabled)
GradientSync.check("second gradient", world_sizes=(1,))(gradient_sync.a_second_gradient_is_rejected)
no_sync.check("silence")(accumulation.no_message_inside)
no_sync.check("exceptions", world_sizes=(1, 2))(accumulation.an_exception_leaves_it_as_it_was)
no_sync.check("accumulation", world_sizes=(1, 2, 3))(accumulation.the_sum_is_sent)
no_sync.check("second backward", world_sizes=(1, 2))(refusals.a_second_backward_inside_is_rejected)


# -- 4.3


@OverlappedDDP.check("plain model", world_sizes=(2,))
def a_plain_model_is_trained(attempt: Attempt) -> None:
    train_and_judge(attempt, Training("Plain", options=TINY_CAP, overlaps=True))


@OverlappedDDP.check("launch order", world_sizes=(2, 3, 4))
def every_rank_launches_in_one_order(attempt: Attempt) -> None:
    """Ranks compute branches in different orders, and one does without the last layer: its bucket is never full."""
    sizes, seed = draw_sizes(attempt, "Fork"), attempt.draw_seed()
    for one_leaves_out in (False, True):
        shares = draw_shares(attempt, one_leaves_out)
        found = attempt.run(probe_order, sizes, seed, per_rank=shares)
        said = "computed in another order on each rank" + one_leaves_out * ", the last layer unused on one of them"
        sent = {rank: [call.payload_bytes for call in calls] for rank, calls in enumerate(found)}
        if len({tuple(sorted(each)) for each in sent.values()}) == 1 < len({tuple(each) for each in sent.values()}):
            evidence = {rank: f"{sizes}, {said}: {describe_messages(calls)}" for rank, calls in enumerate(found)}
            raise Wrong(evidence, "Ranks launch the same buckets in different orders. Look at: who decides the order?")
        for rank, calls in enumerate(found):
            judge_messages(rank, calls, sizes.messages(), f"{sizes}, {said}")


@OverlappedDDP.check("same start")
def ranks_start_equal(attempt: Attempt) -> None:
    for model in ("Tied", "Buffered"):
        draw = Draw(attempt)
        judge_start(train(attempt, Training(model, overlaps=True), draw), model, draw)


@OverlappedDDP.check("values")
def training_equals_one_process(attempt: Attempt) -> None:
    odd = attempt.world_size % 2  # all models in worlds of 2 and 4, some in those of 1 and 3
    for model in attempt.random.sample(AWKWARD, 4) if odd else AWKWARD:
        train_and_judge(attempt, Training(model, options=TINY_CAP, overlaps=True))
    train_and_judge(attempt, Training(attempt.random.choice(AWKWARD), overlaps=True))


@OverlappedDDP.check("unused on one rank", world_sizes=(2, 3, 4))
def a_parameter_may_be_unused_somewhere(attempt: Attempt) -> None:
    for options in (TINY_CAP, {}):
        train_and_judge(attempt, Training("TwoRoads", options=options, overlaps=True))


@OverlappedDDP.check("steps", world_sizes=(1, 3))
def steps_of_every_kind(attempt: Attempt) -> None:
    """Gradients that zero_grad() fills with zeros or takes away; a rank without samples, that only finishes."""
    for set_to_none in (False, True):
        steps = [
            [[Micro(x, y)] for x, y in draw_shares(attempt, leaves_out)] for leaves_out in (False, True, False, False)
        ]
        steps[2][attempt.random.randrange(attempt.world_size)] = []
        context = f"zero_grad(set_to_none={set_to_none})"
        judge_steps(attempt, draw_sizes(attempt, "Fork"), steps, context, set_to_none)


@OverlappedDDP.check("wire", world_sizes=(2, 4))
def one_message_per_bucket(attempt: Attempt) -> None:
    models = attempt.random.sample(("Tied", "Frozen", "Buffered", "Mixed"), 4)
    tried = [*zip(models, [TINY_CAP, TINY_CAP, TINY_CAP, {}], strict=True), ("Large", {})]
    for model, options in tried:
        for rank, result in enumerate(train(attempt, Training(model, options=options, overlaps=True), Draw(attempt))):
            judge_state_bytes(rank, result["building"], model)
            for step in result["steps"]:
                said, want = said_cap(model, **options), messages_of(model, **options)
                judge_messages(rank, [*step["working"], *step["finishing"]], want, said)


@OverlappedDDP.check("overlap", world_sizes=(1, 2, 4))
def full_buckets_leave_before_backward_goes_on(attempt: Attempt) -> None:
    sizes, seed = draw_sizes(attempt), attempt.draw_seed()
    found = attempt.run(probe_progress, sizes, seed, per_rank=draw_shares(attempt))
    layers = len(sizes.widths) - 1
    for rank, steps in enumerate(found):
        for number, step in enumerate(steps, 1):
            for place, launched in sorted(step["launched"].items(), reverse=True):
                if launched < (full := sizes.full_by(place)):
                    when = f"was done with layers {place + 1} to {layers}" if place else "had ended"
                    said = f"{sizes}, step {number}: when backward {when}, {launched} were launched; {full} were full"
                    raise Wrong({rank: said}, _why_late(step, sizes))
            _refuse_waits(rank, step, f"{sizes}, step {number}")


def _why_late(step: dict, sizes) -> str:
    if not step["working"]:
        return "Nothing was launched in backward. Look at: who tells you that a gradient is complete, and when?"
    if len(step["calls"]) < len(sizes.messages()):
        return "Look at: what becomes of the last bucket?"
    return "Look at: how soon after its last gradient is a bucket launched?"


def _refuse_waits(rank: int, step: dict, said: str) -> None:
    in_turn = sum(not call.is_async for call in step["working"])
    if in_turn or step["waits"]:
        waited = f"{in_turn or step['waits']} messages were waited for inside backward(); expected none"
        raise Wrong({rank: f"{said}: {waited}"}, "Look at: what does async_op=True give back, and who may wait for it?")


@OverlappedDDP.check("nobody waits", world_sizes=(2, 4))
def backward_ends_without_the_other_ranks(attempt: Attempt) -> None:
    """And finish_gradient_sync() does not: what it leaves must hold the late rank's part."""
    sizes, seed, late = draw_sizes(attempt), attempt.draw_seed(), attempt.random.randrange(attempt.world_size)
    shares, token = draw_shares(attempt), attempt.draw_seed()
    found = attempt.run(probe_late, sizes, token, late, seed, per_rank=shares)
    if found[late]["missing"]:
        said = f"{sizes}: while rank {late} had sent nothing, backward() did not end here in {PATIENCE_S:g} s"
        raise Wrong(dict.fromkeys(found[late]["missing"], said), "Look at: what in backward() waits for other ranks?")
    want, local = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
    context = f"{sizes}, rank {late} late by a little"
    try:
        judge_gradients(by_rank(found, "gradients"), want, local, context)
    except Wrong as wrong:
        raise Wrong(wrong.evidence, "Look at: what is waited for, before finish_gradient_sync() returns?") from None


OverlappedDDP.check("refusals", world_sizes=(1, 2))(refusals.wrong_backwards_are_rejected)


@OverlappedDDP.check("memory", world_sizes=(1, 2))
def gradients_live_in_the_buckets(attempt: Attempt) -> None:
    sizes = draw_sizes(attempt)
    want_bytes = sum(message.nbytes for message in sizes.messages())
    most_bytes = 1.1 * want_bytes  # a bucket may be filled up to an even size
    found = attempt.run(probe_memory, sizes, most_bytes, attempt.draw_seed(), per_rank=draw_shares(attempt))
    for rank, moments in enumerate(found):
        for when, held_bytes in moments.items():
            if held_bytes > most_bytes:
                said = f"{sizes}: {when}, gradients and buckets hold {held_bytes:,} bytes; expected {want_bytes:,}"
                raise Wrong({rank: said}, "Look at: once a gradient is in its bucket, what does .grad still point at?")
    judge_footprint(attempt, "Large", {}, said_cap("Large"))  # and nothing that is neither .grad nor sent


@OverlappedDDP.check("lives", world_sizes=(1, 2))
def each_wrapper_has_hooks_of_its_own(attempt: Attempt) -> None:
    sizes, seed, shares = draw_sizes(attempt), attempt.draw_seed(), draw_shares(attempt)
    found = attempt.run(probe_lives, sizes, seed, per_rank=shares)
    want, local = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
    for place, name in enumerate(("a wrapper", "its copy by deepcopy", "another wrapper")):
        gradients = {rank: result["gradients"][place] for rank, result in enumerate(found)}
        judge_gradients(gradients, want, local, f"{name}, the three used in turns")
        for rank, result in enumerate(found):
            if len(calls := result["working"][place]) < (buckets := len(sizes.messages())):
                said = f"{sizes}: {describe_messages(calls)} in backward() of {name}; expected {buckets}"
                raise Wrong({rank: said}, "Look at: on which parameters are its hooks, and who has put them there?")
    for rank, result in enumerate(found):
        if result["left"]:
            said = f"the wrapper is thrown away, its module is not: in its backward(), {describe_calls(result['left'])}"
            raise Wrong({rank: said}, "Look at: what still knows of the wrapper, when nobody else does?")
        if result["others"] != 1:
            said = "the wrapper is thrown away, and with it a hook that somebody else had registered on a parameter"
            raise Wrong({rank: said}, "Look at: which hooks are yours to remove?")
        judge_messages(rank, result["anew"], sizes.messages(), f"{sizes}, wrapped again after that")
        judge_gradients({rank: result["own"]}, local[rank], local, "the module by itself, its wrapper thrown away")


@OverlappedDDP.check("group", world_sizes=(3, 4))
def it_stays_inside_its_group(attempt: Attempt) -> None:
    for model in ("TwoRoads", "Buffered"):
        train_and_judge(attempt, Training(model, in_subgroup=True, options=TINY_CAP, overlaps=True))


@OverlappedDDP.check("bf16", world_sizes=(2, 4))
def bf16_stays_bf16(attempt: Attempt) -> None:
    train_and_judge(attempt, Training("TwoRoads", dtype=torch.bfloat16, overlaps=True))


@OverlappedDDP.check("wraps", world_sizes=(2,))
def it_behaves_like_its_module(attempt: Attempt) -> None:
    judge_wrapping(attempt, TINY_CAP, overlaps=True)
