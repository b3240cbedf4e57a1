"""Judge FlatGradients: gradients are slices of one flat tensor, and each rank gets its shard of their mean."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import expect
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.rejections import Error, error_of, judge_errors
from shared.checks.engine.sharded.means import (
    Again,
    Case,
    Reducing,
    Round,
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

WAYS = (
    "as reset() left them",
    "after model.zero_grad()",
    "after model.zero_grad(set_to_none=False)",
    "all None since backward()",
)
SKIPPED = "after reduce() and model.zero_grad(), without reset()"
_HINT_ON_STALE = "There are new gradients. Hint: on which two things does it depend whether reduce() returns at once?"
_HINT_ON_LEFT_OVERS = "Hint: what does a gradient's view still contain when reduce() puts the new gradient into it?"
_HINT_ON_AGAIN = (
    "The flat tensor no longer holds gradients by then. Hint: how can reduce() know that it was already called?"
)
_HINT_ON_LATE = (
    "The gradients of the second backward() are lost. Hint: are the given lines at the beginning and at the end of "
    "reduce() still there?"
)
_HINT_ON_SHAPE = "Hint: which shard of the flat gradients belongs to this rank?"
_HINTS_ON_WAYS = {
    SKIPPED: _HINT_ON_LEFT_OVERS,
    WAYS[0]: "Hint: at which offset is each gradient in the tensor that is sent?",
    WAYS[3]: "Hint: what does a gradient's view still contain when .grad is None?",
}
_HINT_ON_NONE = "Hint: what does the flat tensor contain for a parameter that has no gradient this time?"


@dataclass(kw_only=True)
class SlicedRound(Round):
    addresses: list[tuple[int, int]]  # where each .grad is stored before backward(): see _addresses()
    kept: list[tuple[int, int]]  # where each is stored after reduce()
    zeros: bool  # whether the gradients are zeros before backward()
    dropped: bool  # whether shard.grad is None before backward()


@on_members
def probe_rounds(on: Reducing) -> list[SlicedRound]:
    rounds = []
    for number, way in enumerate(on.case.rounds):
        if number and way != SKIPPED:
            on.piece.reset()
        zeros = not any(bool(p.grad.any()) for p in on.parameters if p.grad is not None)
        addresses, dropped = _addresses(on), on.mean() is None
        calls: Phases = {}
        if way in (*WAYS[1:3], SKIPPED):
            on.module.zero_grad(set_to_none=way != WAYS[2])
        with instrumentation.listening() as calls["before reduce()"]:
            own = on.backward_twice()
        if way == WAYS[3]:
            on.module.zero_grad()
            own.zero_()
        with instrumentation.listening() as calls["reduce()"]:
            on.piece.reduce()
        kept, mean = _addresses(on), on.mean()
        again = [on.again("a second reduce()", on.piece.reduce)]
        if len(on.parameters) > 1:  # so that another .grad is still a view
            on.parameters[0].grad = None
            again.append(on.again("after one .grad was set to None, another reduce()", on.piece.reduce))
        rounds.append(
            SlicedRound(own, mean, calls, again, addresses=addresses, kept=kept, zeros=zeros, dropped=dropped)
        )
        on.x = awkward.other_branches(on.x)
    return rounds


def _addresses(on: Reducing) -> list[tuple[int, int]]:
    """Return for each .grad its storage and the element at which it begins, or (0, −1) for None."""
    grads = [p.grad for p in on.parameters]
    return [(0, -1) if g is None else (g.untyped_storage().data_ptr(), g.storage_offset()) for g in grads]


def gradients_are_slices_of_zeros(attempt: Attempt) -> None:
    for case in (Case(model, WAYS) for model in ("Tied", "Frozen", "Scalar")):
        sizes = [p.numel() for p in awkward.build(case.model, 0).parameters() if p.requires_grad]

        def are_slices(own: SlicedRound, sizes=sizes) -> bool:
            storage, offset = own.addresses[0]
            return own.addresses == [(storage, offset + sum(sizes[:index])) for index in range(len(sizes))]

        found = run_case(attempt, probe_rounds, case)
        for number in range(len(WAYS)):
            steps, when = round_of(found, number), f"{case}, after {'reset()' if number else 'the constructor'}"
            hint = "reduce() would have to copy them. Hint: how can a parameter's .grad be a view of the flat tensor?"
            expect(steps, are_slices, f"{when}: the .grad tensors are not adjacent slices of one tensor", hint)
            hint = "backward() adds to what .grad holds. Hint: which tensor does reset() fill with zeros?"
            expect(steps, lambda own: own.zeros, f"{when}: the gradients are not zero", hint)
            hint = "Hint: what would the next reduce() do with it?"
            expect(steps, lambda own: own.dropped, f"{when}: shard.grad still holds the last mean", hint)


def a_plain_model_has_its_mean(attempt: Attempt) -> None:
    """Judge a plain loop only: reset(), backward(), reduce()."""
    case = Case(rounds=WAYS[:1])
    _judge_means(case, run_case(attempt, probe_rounds, case))


def each_rank_gets_its_shard_of_the_mean(attempt: Attempt) -> None:
    models = ("TwoBranches", "Unused", "Scalar")
    ways = (*WAYS, SKIPPED, SKIPPED)  # the first time the old gradients are zeros, the second time they are not
    cases = [Case(model, ways) for model in (models if attempt.world_size == 2 else models[:1])]
    if attempt.world_size in SUBGROUPS:
        cases.append(Case("TwoBranches", WAYS, in_subgroup=True))
    for case in cases:
        found = run_case(attempt, probe_rounds, case)
        _judge_means(case, found)
        _judge_views(case, found)
        for number in range(len(case.rounds)):
            again = {rank: own.again for rank, own in round_of(found, number).items()}
            judge_second_calls(again, _HINT_ON_AGAIN)


def _judge_means(case: Case, found: dict[int, list[SlicedRound]]) -> None:
    for number, way in enumerate(case.rounds):

        def stale(rank: int, *_, number=number) -> list:
            return [(found[rank][number - 1].mean, _HINT_ON_STALE)]

        context, hint = f"{case}, gradients {way}, round {number + 1}", _HINTS_ON_WAYS.get(way, _HINT_ON_NONE)
        first = stale if way == SKIPPED else lambda *_: []
        judge_means(found, number, context, _HINT_ON_SHAPE, hint, first)


def _judge_views(case: Case, found: dict[int, list[SlicedRound]]) -> None:
    """Judge where each .grad is stored after reduce(). The constructor has made all of them views."""
    hint = "Hint: what does .grad refer to once its gradient has been copied into the view?"
    for number, way in enumerate(case.rounds):
        evidence = f"{case}, gradients {way}: after reduce(), a .grad is not its parameter's view"
        stored = {rank: (rounds[0].addresses, rounds[number].kept) for rank, rounds in found.items()}
        expect(stored, lambda own: own[0] == own[1], evidence, hint)


def each_gradient_is_sent_once(attempt: Attempt) -> None:
    for case in (Case("Tied", WAYS), Case("Frozen", WAYS)):
        found = run_case(attempt, probe_rounds, case)
        judge_traffic(sent_in(found), case.flats(), str(case), {"before reduce()": 0, "reduce()": 1})


@dataclass
class Late:
    again: Again  # a reduce() before the second backward()
    error: Error  # of the reduce() after it


def probe_late(flat_gradients, gone: bool, seed: int, x, y) -> Late:
    """Run backward() after reduce(), and reduce() again.

    Args:
        flat_gradients: The student's class.
        gone: Whether a .grad is set to None before, so that only this gradient is outside the flat tensor.
        seed: The seed of the model.
        x: The inputs.
        y: The targets.
    """
    on = Reducing(flat_gradients, Case(), seed, x, y)
    on.backward()
    on.piece.reduce()
    with torch.no_grad():
        on.flat_parameter.shard.grad *= 0.5  # as clipping does
    again = on.again("after shard.grad was scaled, another reduce()", on.piece.reduce)
    if gone:
        on.parameters[0].grad = None
        on.parameters[0].sum().backward()
    else:
        on.backward()
    return Late(again, error_of(on.piece.reduce))


def later_gradients_are_rejected(attempt: Attempt) -> None:
    """A gradient that is added to what reduce() has left must not be lost without an error."""
    for gone in (False, True):
        found = attempt.run(probe_late, gone, per_rank=Draw(attempt).per_rank)
        judge_second_calls({rank: [each.again] for rank, each in enumerate(found)}, _HINT_ON_AGAIN)
        context = f"backward(), reduce(){', one .grad was set to None' * gone}, backward(), reduce()"
        judge_errors([each.error for each in found], context, hint=_HINT_ON_LATE)


def probe_footprint(flat_gradients, way: str, seed: int, x, y) -> int:
    """Return the bytes that live besides the parameters, once the gradients are reduced."""
    before_bytes = living_bytes()
    on = Reducing(flat_gradients, Case("Large"), seed, x, y)
    for _ in range(2):
        on.piece.reset()
        if way == WAYS[1]:
            on.module.zero_grad()
        on.backward()
        on.piece.reduce()
    dist.barrier()
    return living_bytes() - before_bytes - on.flat_parameter.flat_param.nbytes


def gradients_are_held_once(attempt: Attempt) -> None:
    (flat,) = Case("Large").flats()
    most = flat.nbytes * (1 + 1 / attempt.world_size)  # The mean may have memory of its own.
    for way in WAYS[:2]:
        found = attempt.run(probe_footprint, way, per_rank=Draw(attempt).per_rank)
        hint = "Hint: once a gradient is copied into its view, what does .grad still refer to?"
        expect(
            dict(enumerate(found)),
            lambda held_bytes: held_bytes <= 1.01 * most,
            lambda held_bytes, way=way: f"gradients {way}: {held_bytes:,} bytes are held; expected at most {most:,.0f}",
            hint,
        )
