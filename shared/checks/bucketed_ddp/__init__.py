"""Checks for chapter 03: gradient buckets."""

from dataclasses import dataclass
from typing import Any

import torch

from shared.checks.bucketed_ddp import assignment, properties
from shared.checks.bucketed_ddp import steps as bucket_steps
from shared.checks.bucketed_ddp.properties import judge_in_flight, judge_late_rank
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.buckets import describe_cap, judge_messages, messages_of
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import judge_footprint, judge_state_bytes, reject_early_messages
from shared.checks.engine.framework import Exercise
from shared.checks.engine.loops import Loop, describe, loop_and_judge
from shared.checks.engine.training import Draw, Training, judge_start, train_and_judge
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.models import awkward
from shared.wire import instrumentation

flat_and_slices = Exercise("3.1", "flat_and_slices")
assign_buckets = Exercise("3.2", "assign_buckets")
Bucket = Exercise("3.3", "Bucket")
BucketedDDP = Exercise("3.4", "BucketedDDP", first="same start")

TINY, SMALL, MIDDLE = ({"bucket_cap_mb": cap} for cap in (0.00003, 0.0002, 0.0005))  # 31, 210 and 524 bytes
DEFAULT: dict = {}


@dataclass
class Sent:
    building: list[instrumentation.Call]  # by the constructor
    steps: list[tuple[list[instrumentation.Call], list[instrumentation.Call]]]  # before and in finish_gradient_sync()


def probe_wire(wrapper, model: str, options: dict, steps: int, seed: int, x, y) -> Sent:
    """Wrap a model and run some steps."""
    module = awkward.build(model, seed).to(device_here())
    with instrumentation.listening() as building:
        wrapped = wrapper(module, **options)
    found = []
    for _ in range(steps):
        with instrumentation.listening() as working:
            awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here())).backward()
        with instrumentation.listening() as finishing:
            wrapped.finish_gradient_sync()
        found.append((working, finishing))
        module.zero_grad()
    return Sent(building, found)


# -- 3.1 to 3.3

flat_and_slices.check("values", world_sizes=(1,))(properties.slices_lie_in_one_tensor)

assign_buckets.check("buckets", world_sizes=(1,))(assignment.parameters_fill_buckets)
assign_buckets.check("first bucket", world_sizes=(1,))(assignment.the_first_bucket_is_smaller)
assign_buckets.check("dtypes", world_sizes=(1,))(assignment.a_bucket_has_one_dtype_and_device)
assign_buckets.check("trainable", world_sizes=(1,))(assignment.only_trainable_parameters_are_assigned)
assign_buckets.check("units", world_sizes=(1,))(assignment.caps_are_in_mb)
assign_buckets.check("any iterable", world_sizes=(1,))(assignment.any_iterable_will_do)

Bucket.check("values", world_sizes=(1, 2, 3))(bucket_steps.each_gradient_becomes_the_mean)
Bucket.check("zero_grad", world_sizes=(2,))(bucket_steps.it_survives_zero_grad)
Bucket.check("None", world_sizes=(2, 4))(bucket_steps.none_counts_as_zeros)
Bucket.check("waits", world_sizes=(2, 3))(bucket_steps.it_waits_when_asked_to)
Bucket.check("wire", world_sizes=(2,))(bucket_steps.it_sends_one_message)
Bucket.check("one copy", world_sizes=(2,))(bucket_steps.gradients_are_slices)
Bucket.check("group", world_sizes=(3, 4))(bucket_steps.only_its_group_takes_part)
Bucket.check("nothing in flight", world_sizes=(2,))(properties.bucket_rejects_a_wait_for_nothing)
Bucket.check("graphs", world_sizes=(2,))(properties.bucket_rejects_graphs)


# -- 3.4


BucketedDDP.check("same start", world_sizes=(2, 4))(
    on_each(judge_start, *(Training(model, options=SMALL) for model in ("Tied", "Buffered")))
)
BucketedDDP.check("plain model", world_sizes=(2,))(
    on_each(train_and_judge, *(Training("Plain", options=options) for options in (DEFAULT, SMALL)))
)


@BucketedDDP.check("values")
def training_equals_one_process(attempt: Attempt) -> None:
    models = ["Tied", "Frozen", "Unused", "Scalar", "Buffered", "Mixed", "Crowd"]
    models += awkward.HAVE_MODES
    caps, shift = [TINY, SMALL, MIDDLE, DEFAULT], attempt.random.randrange(4)
    for index, model in enumerate(attempt.random.sample(models, 4) if attempt.world_size == 3 else models):
        train_and_judge(attempt, Training(model, options=caps[(index + shift) % 4]))


@BucketedDDP.check("unused on one rank", world_sizes=(2, 3, 4))
def a_parameter_may_be_unused_somewhere(attempt: Attempt) -> None:
    try:
        for options in (SMALL, DEFAULT):
            train_and_judge(attempt, Training("TwoBranches", options=options))
    except Wrong as wrong:  # a process that died gives no reason
        hint = "Hint: does each bucket have the same size on every rank, even if some ranks have no gradient?"
        wrong.hint = wrong.hint or hint
        raise


BucketedDDP.check("accumulation", world_sizes=(2, 3))(
    on_each(train_and_judge, Training("TwoBranches", micro_batches=3, options=SMALL))
)


@BucketedDDP.check("zero_grad", world_sizes=(2, 3))
def zero_grad_may_be_called_either_way(attempt: Attempt) -> None:
    for ways in ((False,) * 3, (True, False, True, True, False)):
        loop = Loop("TwoBranches", ways, SMALL)
        for rank, steps in enumerate(loop_and_judge(attempt, loop)):
            for index, step in enumerate(steps[1:], 1):
                if step.replaced and not ways[index]:
                    what = f"{step.replaced[0]}.grad was in a bucket, but finish_gradient_sync() replaced it"
                    hint = "Hint: when are buckets created, and what does pack() do if .grad is already the slice?"
                    raise Wrong({rank: f"{describe(loop)}, step {index + 1}: {what}"}, hint)


@BucketedDDP.check("no backward", world_sizes=(2, 4))
def a_rank_may_have_nothing_to_do(attempt: Attempt) -> None:
    for ways in ((True,) * 3, (False,) * 3):
        idle = tuple((attempt.random.randrange(attempt.world_size), step) for step in (1, 2))
        loop_and_judge(attempt, Loop("Mixed", ways, SMALL, idle))


@BucketedDDP.check("wire", world_sizes=(2, 4))
def one_message_per_bucket(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen", "Buffered", "Mixed", "Crowd"):
        cap = attempt.random.choice([0.00003, 0.0001, 0.0002, 0.0005])
        _judge_wire(attempt, model, cap)
    _judge_wire(attempt, "Crowd", 0.0005)
    _judge_wire(attempt, "Mixed", None)


@BucketedDDP.check("caps", world_sizes=(2,))
def caps_are_in_mb(attempt: Attempt) -> None:
    for cap in (None, 1.5):
        _judge_wire(attempt, "Large", cap, steps=1)


def _judge_wire(attempt: Attempt, model: str, cap: float | None, steps: int = 2) -> None:
    options: dict[str, Any] = DEFAULT if cap is None else {"bucket_cap_mb": cap}
    found = attempt.run(probe_wire, model, options, steps, per_rank=Draw(attempt).per_rank)
    expected = messages_of(model, **options)
    for rank, result in enumerate(found):
        judge_state_bytes(rank, result.building, model)
        for working, finishing in result.steps:
            reject_early_messages(rank, working, model)
            judge_messages(rank, finishing, expected, describe_cap(model, cap))


@BucketedDDP.check("in flight", world_sizes=(2, 4))
def all_buckets_are_in_flight_at_once(attempt: Attempt) -> None:
    """A rank launches all messages before it waits for the first, and returns after all of them are complete."""
    late, message = attempt.random.randrange(attempt.world_size), describe_cap("Plain", TINY["bucket_cap_mb"])
    messages = len(messages_of("Plain", bucket_cap_mb=TINY["bucket_cap_mb"]))
    loop = Loop("Plain", (True, True), TINY, late=late, messages=messages, token=attempt.draw_seed())
    found = loop_and_judge(attempt, loop)
    for rank, steps in enumerate(found):
        for step in steps:
            judge_in_flight(rank, step.events, message)
    for steps in zip(*found, strict=True):
        # The check "wire" reports a rank that never launches as many messages.
        waited = [rank for rank in steps[late].missing if len(steps[rank].finishing) >= messages]
        judge_late_rank(late, waited, messages, message)


@BucketedDDP.check("one copy", world_sizes=(2,))
def gradients_are_held_once(attempt: Attempt) -> None:
    for options in (DEFAULT, {"bucket_cap_mb": 0.5}):
        judge_footprint(attempt, "Large", options, describe_cap("Large", options.get("bucket_cap_mb")))


BucketedDDP.check("group", world_sizes=(3, 4))(
    on_each(
        train_and_judge,
        *(Training(model, in_subgroup=True, options=SMALL) for model in ("TwoBranches", "Buffered")),
    )
)
BucketedDDP.check("bf16", world_sizes=(2, 4))(
    on_each(train_and_judge, Training("TwoBranches", dtype=torch.bfloat16, options=SMALL))
)
BucketedDDP.check("graphs", world_sizes=(2,))(on_each(properties.judge_rejection, SMALL))
BucketedDDP.check("wrapping", world_sizes=(2,))(on_each(judge_wrapping, DEFAULT, SMALL))
