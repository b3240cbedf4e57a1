"""Checks for chapter 02: data parallelism by hand."""

import torch

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.compare import describe_calls, judge_gradients, judge_state, reject_frozen_gradients
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import judge_gradient_bytes, judge_state_bytes, reject_early_messages
from shared.checks.engine.framework import Exercise
from shared.checks.engine.subgroups import called_alone, members_of
from shared.checks.engine.training import Draw, Training, judge_start, train, train_and_judge
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.manual_ddp import sampler, weighted
from shared.checks.manual_ddp.weighted import (
    gradients_of_one_process,
    judge_averages,
    probe_average,
    probe_average_beside_old_gradients,
    probe_broadcast,
    probe_mean,
)
from shared.checks.models import awkward
from shared.ranks.diagnosis import name_ranks

AWKWARD = ("Tied", "Frozen", "Unused", "Scalar", "Buffered", "Strided", "Mixed", *awkward.HAVE_MODES)
MANY_ROWS = range(2_000, 8_000)  # may be drawn; these are too many to be passed between ranks without the network

mean_over_ranks_ = Exercise("2.1", "mean_over_ranks_")
broadcast_state = Exercise("2.2", "broadcast_state")
average_gradients = Exercise("2.3", "average_gradients")
ManualDDP = Exercise("2.4", "ManualDDP")
average_gradients_weighted = Exercise("2.5", "average_gradients_weighted")
ShardedSampler = Exercise("2.6", "ShardedSampler")


# -- 2.1


@mean_over_ranks_.check("values")
def mean_is_right(attempt: Attempt) -> None:
    for shape, layout in (
        ((attempt.sizes.pick(3, MANY_ROWS), 5), torch.contiguous_format),
        ((), torch.contiguous_format),
        ((2, 3, 2, 2), torch.channels_last),
    ):
        own = [
            torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(attempt.draw_seed())).to(
                memory_format=layout
            )
            for _ in range(attempt.world_size)
        ]
        found = attempt.run(probe_mean, False, per_rank=[(values,) for values in own])
        _judge_mean(found, torch.stack(own).mean(0), own, list(range(attempt.world_size)))


@mean_over_ranks_.check("group", world_sizes=(3, 4))
def mean_within_a_group(attempt: Attempt) -> None:
    count = attempt.sizes.pick(4, MANY_ROWS)
    own = [
        torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(attempt.draw_seed()))
        for _ in range(attempt.world_size)
    ]
    found = attempt.run(probe_mean, True, per_rank=[(values,) for values in own], context=called_alone(attempt))
    members = members_of(attempt, True)
    _judge_mean(found, torch.stack([own[rank] for rank in members]).mean(0), own, members)
    for rank in members:
        if [call.op for call in found[rank].calls] != ["all_reduce"]:
            raise Wrong({rank: f"{describe_calls(found[rank].calls)}; expected 1 all_reduce"})


def _judge_mean(found, expected, own, members) -> None:
    judge_gradients(
        {rank: {"the tensor": found[rank].value} for rank in members},
        {"the tensor": expected},
        {rank: {"the tensor": own[rank]} for rank in members},
        f"mean over {name_ranks(members)}",
    )


@mean_over_ranks_.check("wire", world_sizes=(2, 4))
def mean_costs_one_message(attempt: Attempt) -> None:
    own = [(torch.ones(100, dtype=torch.float32),)] * attempt.world_size
    for rank, result in enumerate(attempt.run(probe_mean, False, per_rank=own)):
        if [(call.op, call.payload_bytes) for call in result.calls] != [("all_reduce", 400)]:
            raise Wrong({rank: f"{describe_calls(result.calls)}; expected 1 all_reduce of 400 bytes"})


# -- 2.2


@broadcast_state.check("values")
def every_rank_has_the_first_ranks_state(attempt: Attempt) -> None:
    _judge_broadcast(attempt, False, list(range(attempt.world_size)))


@broadcast_state.check("group", world_sizes=(3, 4))
def the_groups_first_rank_counts(attempt: Attempt) -> None:
    _judge_broadcast(attempt, True, members_of(attempt, True))


def _judge_broadcast(attempt: Attempt, in_subgroup: bool, members: list[int]) -> None:
    for model in ("Frozen", "Buffered", "Strided"):
        seeds = [attempt.draw_seed() for _ in range(attempt.world_size)]
        args, context = [(seed,) for seed in seeds], called_alone(attempt) if in_subgroup else ""
        found = attempt.run(probe_broadcast, model, in_subgroup, per_rank=args, context=context)
        if not all(found[rank].kept for rank in members):
            evidence = "a parameter or buffer was replaced by another tensor, or its requires_grad was changed"
            hint = "Hint: which operation writes into the tensor that the module already has?"
            raise Wrong(f"{awkward.describe(model)}: {evidence}", hint)
        own = {rank: awkward.state_of(awkward.build(model, seeds[rank])) for rank in members}
        judge_state({rank: found[rank].state for rank in members}, own[members[0]], members[0], own)


@broadcast_state.check("wire", world_sizes=(2, 4))
def each_tensor_is_sent_once(attempt: Attempt) -> None:
    for model in ("Tied", "Buffered"):
        seeds = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
        for rank, result in enumerate(attempt.run(probe_broadcast, model, False, per_rank=seeds)):
            judge_state_bytes(rank, result.calls, model)


# -- 2.3


def _judge_average(attempt: Attempt, model: str) -> None:
    draw, members = Draw(attempt), list(range(attempt.world_size))
    same = [(draw.seeds[0], x, y) for x, y in draw.shares]
    found = attempt.run(probe_average, model, False, per_rank=same)
    judge_averages(found, gradients_of_one_process(model, draw, members), members, awkward.describe(model))
    reject_frozen_gradients({rank: each.frozen for rank, each in enumerate(found)}, model)


average_gradients.check("plain model", world_sizes=(2,))(on_each(_judge_average, "Plain"))
average_gradients.check("values")(on_each(_judge_average, "Tied", "Frozen", "Unused", "Scalar", "Strided", "Mixed"))
average_gradients.check("unused on one rank", world_sizes=(2, 3, 4))(on_each(_judge_average, "TwoBranches"))


@average_gradients.check("group", world_sizes=(3, 4))
def only_the_group_takes_part(attempt: Attempt) -> None:
    draw = Draw(attempt)
    same = [(draw.seeds[0], x, y) for x, y in draw.shares]
    found = attempt.run(probe_average, "TwoBranches", True, per_rank=same, context=called_alone(attempt))
    members = members_of(attempt, True)
    judge_averages(found, gradients_of_one_process("TwoBranches", draw, members), members, called_alone(attempt))


@average_gradients.check("wire", world_sizes=(2, 4))
def each_gradient_is_sent_once(attempt: Attempt) -> None:
    for model, probe, note in (
        ("Tied", probe_average, ""),
        ("Frozen", probe_average, ""),
        ("Frozen", probe_average_beside_old_gradients, "whose .grad is not None"),
    ):
        draw = Draw(attempt)
        found = attempt.run(probe, model, False, per_rank=draw.per_rank)
        for rank, result in enumerate(found):
            judge_gradient_bytes(rank, result.calls, model, note=note)


# -- 2.4


ManualDDP.check("same start")(on_each(judge_start, Training("Tied"), Training("Buffered")))
ManualDDP.check("plain model", world_sizes=(2,))(on_each(train_and_judge, Training("Plain")))
ManualDDP.check("values")(on_each(train_and_judge, *map(Training, AWKWARD)))
ManualDDP.check("unused on one rank", world_sizes=(2, 3, 4))(on_each(train_and_judge, Training("TwoBranches")))
ManualDDP.check("accumulation", world_sizes=(2, 3))(on_each(train_and_judge, Training("TwoBranches", micro_batches=3)))


@ManualDDP.check("wire", world_sizes=(2, 4))
def it_sends_each_gradient_once_after_backward(attempt: Attempt) -> None:
    for model, micro_batches in (("Tied", 1), ("Frozen", 2), ("Buffered", 1), ("Mixed", 1)):
        for rank, result in enumerate(train(attempt, Training(model, micro_batches), Draw(attempt))):
            judge_state_bytes(rank, result.building, model)
            for step in result.steps:
                reject_early_messages(rank, step.working, model)
                judge_gradient_bytes(rank, step.finishing, model)


ManualDDP.check("group", world_sizes=(3, 4))(
    on_each(train_and_judge, *(Training(model, in_subgroup=True) for model in ("TwoBranches", "Buffered")))
)
ManualDDP.check("bf16", world_sizes=(2, 4))(on_each(train_and_judge, Training("TwoBranches", dtype=torch.bfloat16)))
ManualDDP.check("wrapping", world_sizes=(2,))(judge_wrapping)


# -- 2.5

average_gradients_weighted.check("values")(weighted.unequal_shares_weigh_by_their_samples)
average_gradients_weighted.check("many samples", world_sizes=(1, 2))(weighted.many_samples_are_counted_exactly)
average_gradients_weighted.check("group", world_sizes=(3, 4))(weighted.only_the_groups_samples_count)
average_gradients_weighted.check("wire", world_sizes=(2, 4))(weighted.weighing_costs_one_small_message)


# -- 2.6

ShardedSampler.check("every sample")(sampler.every_sample_once_and_equal_shares)
ShardedSampler.check("epochs", world_sizes=(1, 3))(sampler.epochs_and_seeds_decide_the_order)
ShardedSampler.check("wire", world_sizes=(2,))(sampler.the_sampler_needs_no_messages)
