"""Checks for chapter 04: gradient buckets whose all-reduces start while backward computes.

The checks never use elapsed time. They judge order: which collectives a rank has launched when its backward reaches a
layer, and whether its backward can end while another rank has launched nothing yet.
"""

import torch

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.buckets import describe_cap, describe_messages, judge_messages, messages_of
from shared.checks.engine.compare import describe_calls, judge_gradients
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import judge_footprint, judge_state_bytes
from shared.checks.engine.framework import Exercise
from shared.checks.engine.late_ranks import PATIENCE_S
from shared.checks.engine.overlap_models import draw_sizes
from shared.checks.engine.overlap_probes import (
    Micro,
    Progress,
    probe_late,
    probe_lives,
    probe_memory,
    probe_order,
    probe_progress,
)
from shared.checks.engine.overlap_steps import draw_shares, judge_steps, mean_of
from shared.checks.engine.training import Draw, Training, judge_start, train, train_and_judge
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.models import awkward
from shared.checks.overlapped_ddp import accumulation, gradient_sync, launch_queue

LaunchQueue = Exercise("4.1", "LaunchQueue")
GradientSync = Exercise("4.2", "GradientSync")
OverlappedDDP = Exercise("4.3", "OverlappedDDP", first="same start")
no_sync = Exercise("4.4", "OverlappedDDP")

TINY_CAP = {"bucket_cap_mb": 200 / 2**20}  # the awkward models have about 600 bytes
AWKWARD = ("Plain", "Tied", "Frozen", "Unused", "Scalar", "Buffered", "Mixed", *awkward.HAVE_MODES)


# -- 4.1, 4.2, 4.4

LaunchQueue.check("order", world_sizes=(1,))(launch_queue.launched_in_order_and_early)
LaunchQueue.check("finish", world_sizes=(1,))(launch_queue.finish_completes_and_begins_anew)
GradientSync.check("backward", world_sizes=(1,))(gradient_sync.gradients_are_added_in_backward)
GradientSync.check("disabled", world_sizes=(1,))(gradient_sync.it_does_nothing_when_disabled)
GradientSync.check("no backward", world_sizes=(1,))(gradient_sync.finish_takes_part_without_a_backward)
no_sync.check("no communication")(accumulation.no_message_inside)
no_sync.check("exceptions", world_sizes=(1, 2))(accumulation.an_exception_leaves_it_as_it_was)
no_sync.check("pending afterwards", world_sizes=(1, 2))(accumulation.accumulated_gradients_are_pending)
no_sync.check("accumulation", world_sizes=(1, 2, 3))(accumulation.the_sum_is_sent)


# -- 4.3


OverlappedDDP.check("same start", world_sizes=(2, 4))(
    on_each(judge_start, *(Training(model, overlaps=True) for model in ("Tied", "Buffered")))
)
OverlappedDDP.check("plain model", world_sizes=(2,))(
    on_each(train_and_judge, Training("Plain", options=TINY_CAP, overlaps=True))
)


@OverlappedDDP.check("without finishing", world_sizes=(2,))
def backward_finishes_by_itself(attempt: Attempt) -> None:
    """Never call finish_gradient_sync(). Try two backward() per step, too: the second averages again."""
    try:
        for micro_batches in (1, 2):
            how = Training("TwoBranches", micro_batches, options=TINY_CAP, overlaps=True, finishes=False)
            train_and_judge(attempt, how)
    except Wrong as wrong:
        hint = "Hint: finish_gradient_sync() was not called here. Which other method synchronizes, and who calls it?"
        raise Wrong(wrong.evidence, hint) from None


@OverlappedDDP.check("launch order", world_sizes=(2, 3, 4))
def every_rank_launches_in_one_order(attempt: Attempt) -> None:
    """Try branches that ranks compute in different orders, and a last layer that one rank never uses."""
    sizes, seed = draw_sizes(attempt, "Fork"), attempt.draw_seed()
    for one_leaves_out in (False, True):
        shares = draw_shares(attempt, one_leaves_out)
        found = attempt.run(probe_order, sizes, seed, per_rank=shares)
        context = (
            "ranks compute their branches in different orders" + one_leaves_out * ", and one rank skips the last layer"
        )
        sent = {rank: [call.payload_bytes for call in calls] for rank, calls in enumerate(found)}
        orders, sets = (
            {tuple(payloads) for payloads in sent.values()},
            {tuple(sorted(payloads)) for payloads in sent.values()},
        )
        if len(sets) == 1 < len(orders):
            evidence = {rank: f"{sizes}, {context}: {describe_messages(calls)}" for rank, calls in enumerate(found)}
            raise Wrong(
                evidence,
                "Ranks launch the same buckets in different orders, so the all-reduces add up unrelated gradients.\n"
                "Hint: what decides which bucket is launched next?",
            )
        for rank, calls in enumerate(found):
            judge_messages(rank, calls, sizes.messages(), f"{sizes}, {context}")


@OverlappedDDP.check("values")
def training_equals_one_process(attempt: Attempt) -> None:
    odd = attempt.world_size % 2  # World sizes 2 and 4 try all models, 1 and 3 only some of them.
    for model in attempt.random.sample(AWKWARD, 4) if odd else AWKWARD:
        train_and_judge(attempt, Training(model, options=TINY_CAP, overlaps=True))
    train_and_judge(attempt, Training(attempt.random.choice(AWKWARD), overlaps=True))


OverlappedDDP.check("unused on one rank", world_sizes=(2, 3, 4))(
    on_each(train_and_judge, *(Training("TwoBranches", options=options, overlaps=True) for options in (TINY_CAP, {})))
)


@OverlappedDDP.check("steps", world_sizes=(1, 3))
def steps_of_every_kind(attempt: Attempt) -> None:
    """Try gradients that zero_grad() sets to zero or to None, and a rank without samples, which only finishes."""
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
            judge_state_bytes(rank, result.building, model)
            for step in result.steps:
                context, expected = describe_cap(model, **options), messages_of(model, **options)
                judge_messages(rank, [*step.working, *step.finishing], expected, context)


@OverlappedDDP.check("overlap", world_sizes=(1, 2, 4))
def full_buckets_are_launched_before_backward_continues(attempt: Attempt) -> None:
    sizes, seed = draw_sizes(attempt), attempt.draw_seed()
    found = attempt.run(probe_progress, sizes, seed, per_rank=draw_shares(attempt))
    layers = len(sizes.widths) - 1
    for rank, steps in enumerate(found):
        for number, step in enumerate(steps, 1):
            for index, launched in sorted(step.launched.items(), reverse=True):
                if launched < (full := sizes.full_by(index)):
                    evidence = (
                        f"{sizes}, step {number}: when backward had finished layers {index + 1} to {layers}, "
                        f"{launched} buckets had been launched; expected {full}, the number of full buckets"
                    )
                    raise Wrong({rank: evidence}, _why_late(step, sizes))
            _reject_waits(rank, step, f"{sizes}, step {number}")


def _why_late(step: Progress, sizes) -> str:
    if not step.working:
        return (
            "No bucket was launched during backward. Hint: which hook tells you that a gradient is complete, and when?"
        )
    if len(step.calls) < len(sizes.messages()):
        return "Hint: how many buckets does your wrapper have, and which line launches the last one?"
    return "Hint: how soon after its last gradient is ready is a bucket launched?"


def _reject_waits(rank: int, step: Progress, context: str) -> None:
    blocking = sum(not call.is_async for call in step.working)
    if blocking or step.waits:
        waited = f"hooks waited for {blocking or step.waits} all-reduces; expected them to wait for none"
        raise Wrong(
            {rank: f"{context}: {waited}"}, "Hint: what does async_op=True return, and where may you wait for it?"
        )


@OverlappedDDP.check("no waiting in hooks", world_sizes=(2, 4))
def hooks_do_not_wait_for_the_other_ranks(attempt: Attempt) -> None:
    """Check also that the end of backward() does wait: its result must contain the late rank's gradients."""
    sizes, seed, late = draw_sizes(attempt), attempt.draw_seed(), attempt.random.randrange(attempt.world_size)
    shares, token = draw_shares(attempt), attempt.draw_seed()
    found = attempt.run(probe_late, sizes, token, late, seed, per_rank=shares)
    if found[late].missing:
        evidence = (
            f"{sizes}: backward did not reach the first layer on this rank within {PATIENCE_S:g} s, while rank {late} "
            "had launched nothing"
        )
        raise Wrong(dict.fromkeys(found[late].missing, evidence), "Hint: what in a hook waits for other ranks?")
    expected, local = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
    context = f"{sizes}, rank {late} is a little later than the others"
    try:
        gradients = {rank: result.gradients for rank, result in enumerate(found)}
        judge_gradients(gradients, expected, local, context)
    except Wrong as wrong:
        raise Wrong(wrong.evidence, "Hint: what must be complete before backward() returns?") from None


OverlappedDDP.check("rejections", world_sizes=(1, 2))(accumulation.a_graph_is_rejected)


@OverlappedDDP.check("memory", world_sizes=(1, 2))
def gradients_live_in_the_buckets(attempt: Attempt) -> None:
    sizes = draw_sizes(attempt)
    want_bytes = sum(message.nbytes for message in sizes.messages())
    most_bytes = 1.1 * want_bytes  # A bucket may be padded.
    found = attempt.run(probe_memory, sizes, most_bytes, attempt.draw_seed(), per_rank=draw_shares(attempt))
    for rank, moments in enumerate(found):
        for when, held_bytes in moments.items():
            if held_bytes > most_bytes:
                evidence = f"{sizes}: {when}, gradients and buckets hold {held_bytes:,} bytes; expected {want_bytes:,}"
                raise Wrong({rank: evidence}, "Hint: once a gradient is in its bucket, what does .grad still refer to?")
    judge_footprint(attempt, "Large", {}, describe_cap("Large"))  # also counts memory that is neither a .grad nor sent


@OverlappedDDP.check("several wrappers", world_sizes=(1, 2))
def each_wrapper_has_hooks_of_its_own(attempt: Attempt) -> None:
    sizes, seed, shares = draw_sizes(attempt), attempt.draw_seed(), draw_shares(attempt)
    found = attempt.run(probe_lives, sizes, seed, per_rank=shares)
    expected, local = mean_of(sizes, seed, [[Micro(x, y)] for x, y in shares])
    for index, name in enumerate(("a wrapper", "its copy by deepcopy", "another wrapper")):
        gradients = {rank: result.gradients[index] for rank, result in enumerate(found)}
        judge_gradients(gradients, expected, local, f"{name}, when all three are used in turn")
        for rank, result in enumerate(found):
            if len(calls := result.working[index]) < (buckets := len(sizes.messages())):
                evidence = f"{sizes}: backward() of {name} launched {describe_messages(calls)}; expected {buckets}"
                raise Wrong(
                    {rank: evidence},
                    "Hint: on which parameters are its hooks registered, and which code registers them?",
                )
    for rank, result in enumerate(found):
        if result.left:
            evidence = (
                "the wrapper was deleted, but backward() of its module still launched "
                f"{describe_calls(result.left)}; expected none"
            )
            raise Wrong({rank: evidence}, "Hint: what still holds a reference to the wrapper after `del`?")
        if result.others != 1:
            evidence = "deleting the wrapper also removed a hook that other code had registered on a parameter"
            raise Wrong({rank: evidence}, "Hint: which hooks did the wrapper register, and does it remove only those?")
        judge_messages(
            rank, result.anew, sizes.messages(), f"{sizes}, wrapped again after the first wrapper was deleted"
        )
        judge_gradients({rank: result.own}, local[rank], local, "the module alone, after its wrapper was deleted")


OverlappedDDP.check("group", world_sizes=(3, 4))(
    on_each(
        train_and_judge,
        *(Training(model, in_subgroup=True, options=TINY_CAP, overlaps=True) for model in ("TwoBranches", "Buffered")),
    )
)
OverlappedDDP.check("bf16", world_sizes=(2, 4))(
    on_each(train_and_judge, Training("TwoBranches", dtype=torch.bfloat16, overlaps=True))
)


@OverlappedDDP.check("wrapping", world_sizes=(2,))
def it_behaves_like_its_module(attempt: Attempt) -> None:
    judge_wrapping(attempt, TINY_CAP, overlaps=True)
