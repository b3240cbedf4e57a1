"""Judge ShardedBucket: gradients are held in full only until they are reduce-scattered."""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong, expect
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.hints import replacing_hints, where_it_raises
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.rejections import error_of, judge_errors
from shared.checks.engine.sharded.flat_layout import flat_parameter_type_of
from shared.checks.engine.sharded.means import (
    Case,
    Reducing,
    Round,
    describe,
    judge_means,
    judge_second_calls,
    on_members,
    round_of,
    run_case,
    sent_in,
)
from shared.checks.engine.sharded.wire import Phases, judge_traffic
from shared.checks.engine.subgroups import SUBGROUPS
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

ROUNDS = (False, True, False)  # whether the mean of the round before is still there
_HINT_ON_NONE = "Hint: what does a rank send if all of its gradients are None?"
_HINT_ON_VALUES = (
    "Hint: where is each gradient in the flat tensor that is sent, and what is sent for a gradient of None?"
)
_HINT_ON_DTYPE = (
    "shard.grad must have the dtype of the shard, so do not set grad_dtype. "
    "Hint: which dtype does the handle's wait() return here?"
)
_HINT_ON_LAST = "It is only the mean of the last backward. Hint: what did shard.grad contain before wait()?"
_HINT_ON_SHARDS = "Hint: what does wait() do with the shard that it receives?"


def _pack(on: Reducing) -> None:
    for index in range(len(on.parameters)):
        on.piece.pack(index)


@dataclass(kw_only=True)
class BucketRound(Round):
    known: bool  # whether the bucket knows its parameters
    left: list[int]  # the parameters that still have a .grad after pack()
    packed: list[int]  # how many messages were sent at each wait() for the previous bucket, until pack() has ended
    launched: list[int]  # the same, until launch() has ended


@on_members
def probe_rounds(on: Reducing) -> list[BucketRound]:
    rounds, rank = [], dist.get_rank()
    known = [id(p) for p in getattr(on.piece, "parameters", [])] == [id(p) for p in on.parameters]
    order = random.Random(on.seed).sample(range(len(on.parameters)), len(on.parameters))
    for adds_up in on.case.rounds:
        if not adds_up:
            on.flat_parameter.shard.grad = None
        own, left = on.backward_twice(), []
        calls: Phases = {}
        if on.case.computing is not None and rank not in on.case.computing:
            on.module.zero_grad()
            own.zero_()
        with instrumentation.listening() as sent:
            on.piece.previous = previous = PreviousBucket(sent)
            with instrumentation.listening() as calls["pack()"]:
                for index in order:
                    on.piece.pack(index)
                    left += [index] if on.parameters[index].grad is not None else []
            packed = previous.waited_at[:]
            with instrumentation.listening() as calls["launch()"]:
                on.piece.launch()
            launched = previous.waited_at[:]
            with instrumentation.listening() as calls["wait()"]:
                on.piece.wait()
        mean, again = on.mean(), [on.again("a second wait()", on.piece.wait)]
        rounds.append(BucketRound(own, mean, calls, again, known=known, left=left, packed=packed, launched=launched))
        on.x = awkward.other_branches(on.x)
    return rounds


class PreviousBucket:  # Students see this name in error messages.
    """Stand in for the previous bucket, and log how many messages had been sent at each wait()."""

    def __init__(self, sent: list):
        self.sent, self.waited_at, self.in_flight = sent, [], sent  # a handle, as long as it is not waited for

    def wait(self) -> None:
        self.waited_at.append(len(self.sent))
        self.in_flight = None


def a_plain_shard_gets_its_mean(attempt: Attempt) -> None:
    _judge_rounds(attempt, Case(rounds=ROUNDS))


@where_it_raises(  # the words of older and newer versions of torch
    {
        "assigned grad has data of a different type": _HINT_ON_DTYPE,
        "assign a gradient with dtype": _HINT_ON_DTYPE,
    }
)
def gradients_of_awkward_models_become_means(attempt: Attempt) -> None:
    """Try also gradients that only one rank computed, or none. Require the attribute `parameters`."""
    with replacing_hints({"": _HINT_ON_NONE, _HINT_ON_SHARDS: _HINT_ON_NONE, _HINT_ON_VALUES: _HINT_ON_NONE}):
        size = attempt.world_size
        for computing in ((attempt.random.randrange(size),) if size > 1 else (), ()):
            _judge_rounds(attempt, Case(rounds=ROUNDS[:1], computing=computing))
    cases = [Case(model, ROUNDS) for model in ("Tied", "Frozen", "TwoBranches", "Scalar", "Unused")]
    cases = cases if attempt.world_size == 2 else attempt.random.sample(cases, 2)
    cases += [Case("TwoBranches", ROUNDS, in_subgroup=True)] if attempt.world_size in SUBGROUPS else []
    mixed = Case("Plain", ROUNDS, dtype=torch.float32, flat_dtype=torch.float64)
    for case in [Case(rounds=ROUNDS), *cases, mixed]:
        _judge_rounds(attempt, case)


def _judge_rounds(attempt: Attempt, case: Case) -> None:
    found = run_case(attempt, probe_rounds, case)
    last: torch.Tensor | float = 0.0  # the mean of the last round that is still there
    for number, adds_up in enumerate(case.rounds):
        steps, before = round_of(found, number), last if adds_up else 0.0
        hint = "Hint: which attribute of a bucket does lab 04's LaunchQueue read?"
        expect(steps, lambda own: own.known, ".parameters is not the list of the layout's parameters", hint)
        hint = "The gradient is in the flat tensor now. Hint: what else still refers to it?"
        expect(steps, lambda own: not own.left, f"{case}: after pack(), .grad still holds a tensor", hint)

        def of_adding(_, index: int, mean: torch.Tensor, before=before) -> list:
            alone, divided = mean - before, mean - before + before / len(mean)
            return [
                (alone[index], _HINT_ON_LAST),
                (divided[index], "Hint: how many times is the earlier mean divided?"),
            ]

        context = f"{describe(attempt, case)}, backward {number + 1}{', added to the one before' if adds_up else ''}"
        further = {"first": of_adding, "before": before} if adds_up else {}
        last = judge_means(found, number, context, _HINT_ON_SHARDS, _HINT_ON_VALUES, **further)
        again = {rank: own.again for rank, own in steps.items()}
        judge_second_calls(again, "Hint: how does wait() know whether a collective is in flight?")


def one_reduce_scatter_per_launch(attempt: Attempt) -> None:
    hint = "Then no communication can overlap with backward. Hint: what can start before wait() is called?"
    for case in (Case("Tied", ROUNDS), Case("Frozen", ROUNDS)):
        found = run_case(attempt, probe_rounds, case)
        calls = {rank: [each.calls["launch()"] for each in rounds] for rank, rounds in found.items()}
        expect(calls, all, "launch() sends nothing", hint)
        judge_traffic(sent_in(found), case.flats(), str(case), {"pack()": 0, "launch() and wait()": 1})


def the_previous_bucket_is_waited_for(attempt: Attempt) -> None:
    found = run_case(attempt, probe_rounds, Case(rounds=ROUNDS[:1]))
    steps = round_of(found, 0)
    hint = "Backward stops while pack() waits. Hint: when must the previous bucket be complete?"
    expect(steps, lambda own: not own.packed, "pack() waits for the previous bucket", hint)
    hint = "Hint: how many flat tensors are alive at the same time if you wait for every bucket only at the end?"
    expect(steps, lambda own: own.launched, "launch() does not call previous.wait()", hint)
    evidence = "messages were sent before launch() called previous.wait()"
    hint = "Then two buckets are in flight at the same time. Hint: which of the two calls must come first?"
    expect(steps, lambda own: own.launched[0] == 0, evidence, hint)


@rehearsed
def probe_late(sharded_bucket, token: int, late: int, rank: int, seed: int, x, y) -> list[int]:
    """Let one rank launch late. Return, on that rank, the ranks whose launch() had not returned by then."""
    on, meeting, missing = Reducing(sharded_bucket, Case(), seed, x, y), Rendezvous(f"bucket{token}"), []
    on.backward()
    _pack(on)
    with launches_unasked():
        if rank == late:
            missing = meeting.missing()
        on.piece.launch()
        if rank != late:
            meeting.arrive()
        on.piece.wait()
    return missing


def launch_returns_at_once(attempt: Attempt) -> None:
    late, token = attempt.random.randrange(attempt.world_size), attempt.draw_seed()
    per_rank = [(rank, *share) for rank, share in enumerate(Draw(attempt).per_rank)]
    if missing := attempt.run(probe_late, token, late, per_rank=per_rank)[late]:
        evidence = f"launch() did not return within {PATIENCE_S:g} s, while rank {late} had launched nothing"
        hint = "Backward stops in the meantime. Hint: which bucket does launch() wait for?"
        raise Wrong(dict.fromkeys(missing, evidence), hint)


def probe_graph(sharded_bucket, seed: int, x, y) -> tuple[str, str]:
    """Return the error that a differentiable gradient raises."""
    on = Reducing(sharded_bucket, Case(), seed, x, y)
    on.backward(create_graph=True)
    error = error_of(lambda: on.piece.pack(0))
    on.module.zero_grad()  # a gradient that is part of a graph keeps itself alive
    return error


def gradients_with_a_graph_are_rejected(attempt: Attempt) -> None:
    errors = attempt.run(probe_graph, per_rank=Draw(attempt).per_rank)
    hint = "Hint: can autograd differentiate through a reduce-scatter?"
    judge_errors(errors, "after backward(create_graph=True), pack(0)", names="create_graph", hint=hint)


# -- after wait(), only this rank's shard stays in memory

SLACK = 1.02  # padding
PACKED, SECOND, REDUCED = "when both are packed", "when the second is launched", "when both are reduced"
_HINT_ON_VIEW = "Hint: what does the handle's wait() return, and what does shard.grad need instead?"
_HINTS = {
    PACKED: (
        "Hint: once a gradient is in the flat tensor, what still refers to it? And when are flat tensors allocated?"
    ),
    SECOND: "Hint: which tensor should wait() free, what else refers to it, and when is it allocated?",
    REDUCED: "Hint: does the remaining tensor have memory of its own, or is it a view of a larger one?",
}


def probe_memory(sharded_bucket, most_bytes: dict[str, float], seed: int, x, y) -> tuple[dict[str, int], bool]:
    """Reduce a model's gradients in two halves.

    Returns:
        The bytes that live besides the parameters, by moment, and whether a shard.grad is a view of a larger tensor.
    """
    flat_parameter_type = flat_parameter_type_of(sharded_bucket)
    module = awkward.build("Large", seed, torch.float32).to(device_here())
    parameters, found = list(module.parameters()), {}
    middle = len(parameters) // 2
    halves = [flat_parameter_type(parameters[middle:], None), flat_parameter_type(parameters[:middle], None)]
    x, y = x.to(device_here(), torch.float32), y.to(device_here(), torch.float32)
    before_bytes = living_bytes()

    def note(when: str) -> None:
        found[when] = settled_bytes(most_bytes[when], before_bytes)

    first, second = (sharded_bucket(half) for half in halves)
    second.previous = first
    awkward.loss_of(module, x, y).backward()
    for bucket, half in zip((first, second), halves, strict=True):
        for index in range(len(half.layout.parameters)):
            bucket.pack(index)
        if bucket is second:
            note(PACKED)
        bucket.launch()
    note(SECOND)
    for bucket in (first, second):
        bucket.wait()
    note(REDUCED)
    means = [half.shard.grad for half in halves]
    return found, any(mean is not None and mean.untyped_storage().nbytes() > SLACK * mean.nbytes for mean in means)


def only_a_shard_stays(attempt: Attempt) -> None:
    """Allow the second half a receive buffer as large as the bucket, because an all-to-all needs one."""
    sizes = [p.nbytes for p in awkward.build("Large", 0, torch.float32).parameters()]
    size, first, second = attempt.world_size, sum(sizes[len(sizes) // 2 :]), sum(sizes[: len(sizes) // 2])
    expected = {
        PACKED: second + 2 * first,  # the first is in flight
        SECOND: first / size + 2 * second,
        REDUCED: (first + second) / size,
    }
    most = {when: SLACK * nbytes for when, nbytes in expected.items()}
    for rank, (found, is_view) in enumerate(attempt.run(probe_memory, most, per_rank=Draw(attempt).per_rank)):
        for when, held_bytes in found.items():
            if held_bytes > most[when]:
                context = f"two buckets of {first:,} and {second:,} bytes: {when}, gradients, flat tensors and receive"
                evidence = f"{context} buffers hold {held_bytes:,} bytes; expected at most {expected[when]:,.0f}"
                if is_view and when != PACKED:
                    raise Wrong({rank: f"{evidence}. shard.grad shares memory with the flat tensor"}, _HINT_ON_VIEW)
                raise Wrong({rank: evidence}, _HINTS[when])
