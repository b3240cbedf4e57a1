"""Judge pieces that turn the gradients of a flat parameter into this rank's shard of their mean.

These are FlatGradients and ShardedBucket. A probe uses one for several rounds, and returns a record of each round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import (
    cause_of,
    describe_calls,
    first_difference,
    mistakes_in_a_mean,
    nearly_equal,
    tolerance_of,
    total_of,
)
from shared.checks.engine.failures import Wrong, expect
from shared.checks.engine.sharded.flat_layout import flat_parameter_type_of
from shared.checks.engine.sharded.wire import Flat, Phases
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

Kind = TypeVar("Kind", bound="Round")


@dataclass(frozen=True)
class Case:
    """Whose gradients are reduced, and how."""

    model: str = "Plain"
    rounds: tuple = ()  # what is done with the gradients in each round
    in_subgroup: bool = False
    dtype: torch.dtype = torch.float64
    flat_dtype: torch.dtype | None = None  # that of the flat tensors that the layout allocates, if it is another one
    computing: tuple[int, ...] | None = None  # the ranks that run backward(), or None for all

    def __str__(self) -> str:
        parts = [awkward.describe(self.model)] + [f"whose layout allocates {self.flat_dtype}"] * bool(self.flat_dtype)
        if self.computing is not None:
            who = f"only rank {self.computing[0]} has" if self.computing else "no rank has"
            parts.append(f"whose gradients {who} computed")
        return ", ".join(parts)

    def flats(self) -> list[Flat]:
        parameters = awkward.build(self.model, 0, self.dtype).parameters()
        return [Flat(sum(p.numel() for p in parameters if p.requires_grad), self.dtype.itemsize)]


@dataclass
class Again:
    """A call that must do nothing."""

    what: str
    calls: list[instrumentation.Call]
    same: bool  # whether shard.grad is the same after it


@dataclass
class Round:
    """What a rank records of one round."""

    own: torch.Tensor  # this rank's own gradients, side by side
    mean: torch.Tensor | None = None  # what is stored in shard.grad
    calls: Phases = field(default_factory=dict)
    again: list[Again] = field(default_factory=list)


class Reducing:
    """A model on this rank, its flat parameter, and the student's piece for the flat parameter's gradients."""

    def __init__(self, piece_type, case: Case, seed: int, x, y, group=None):
        self.case, self.seed = case, seed
        self.module = awkward.build(case.model, seed, case.dtype).to(device_here())
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.flat_parameter = flat_parameter_type_of(piece_type)(self.parameters, group)
        layout = self.flat_parameter.layout
        if case.flat_dtype:
            layout.new_flat = partial(layout.new_flat, case.flat_dtype)
        self.piece = piece_type(self.flat_parameter)
        self.x, self.y = x.to(device_here(), case.dtype), y.to(device_here(), case.dtype)

    def backward(self, **how) -> None:
        awkward.loss_of(self.module, self.x, self.y).backward(**how)

    def backward_twice(self) -> torch.Tensor:
        """Run backward, and also on a copy of the model. Returns the copy's gradients, side by side."""
        twin = awkward.twin_of(self.case.model, self.module)
        for each in (self.module, twin):
            awkward.loss_of(each, self.x, self.y).backward()
        found = [(p, p.grad) for p in twin.parameters() if p.requires_grad]
        return torch.cat(
            [(torch.zeros_like(p) if grad is None else grad).flatten().detach() for p, grad in found]
        ).cpu()

    def mean(self) -> torch.Tensor | None:
        """Copy what is stored in shard.grad."""
        found = self.flat_parameter.shard.grad
        return None if found is None else found.detach().cpu().flatten().clone()

    def again(self, what: str, call: Callable[[], object]) -> Again:
        """Make a call that must do nothing. Returns what it sends, and whether shard.grad is still the same."""
        before = self.mean()
        with instrumentation.listening() as calls:
            call()
        after = self.mean()
        same = before is after or (before is not None and after is not None and torch.equal(after, before))
        return Again(what, calls, same)


def on_members(probe: Callable[[Reducing], list[Kind]]) -> Callable[..., list[Kind]]:
    """Let a probe observe a case on the ranks that take part."""

    def observe(piece_type, case: Case, seed: int, x, y) -> list:
        group, member = join_subgroup(case.in_subgroup)
        return probe(Reducing(piece_type, case, seed, x, y, group)) if member else []

    return observe


# -- in the kernel


def run_case(attempt: Attempt, probe: Callable[..., list[Kind]], case: Case) -> dict[int, list[Kind]]:
    """Run a probe on fresh data. Returns for each member a record of every round."""
    found = attempt.run(probe, case, per_rank=Draw(attempt).per_rank, context=describe(attempt, case))
    return {rank: found[rank] for rank in members_of(attempt, case.in_subgroup)}


def round_of(found: dict[int, list[Kind]], number: int) -> dict[int, Kind]:
    """Return the records of one round, by global rank."""
    return {rank: rounds[number] for rank, rounds in found.items()}


def sent_in(found: Mapping[int, Sequence[Round]]) -> dict[int, list[Phases]]:
    """Return what each rank sent in each round, by global rank."""
    return {rank: [each.calls for each in rounds] for rank, rounds in found.items()}


def describe(attempt: Attempt, case: Case) -> str:
    return called_alone(attempt) if case.in_subgroup else str(case)


def judge_means(
    found: Mapping[int, Sequence[Round]],
    number: int,
    context: str,
    hint_on_shape: str,
    otherwise: str,
    first: Callable[[int, int, torch.Tensor], list] = lambda *_: [],
    before: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Compare what each rank has in shard.grad after a round with the mean. Returns its shards, as rows.

    Args:
        found: The records of the rounds, by global rank.
        number: The number of the round.
        context: What was tried.
        hint_on_shape: The hint for None and for a wrong shape.
        otherwise: The hint for values that no mistake explains.
        first: Returns the mistakes to think of first, for a rank, its index in the group, and the mean.
        before: What was in shard.grad before, and must be added.

    Raises:
        Wrong: If it is another value.
    """
    size, own = len(found), {rank: rounds[number].own for rank, rounds in found.items()}
    rows = {rank: torch.cat([flat, flat.new_zeros(-len(flat) % size)]).view(size, -1) for rank, flat in own.items()}
    mean = total_of(rows.values()) / size + before
    for index, (rank, rounds) in enumerate(found.items()):
        grad, expected = rounds[number].mean, mean[index]
        if grad is None or grad.shape != expected.shape:
            was = "is None" if grad is None else f"is wrong: {first_difference(grad, expected)}"
            raise Wrong({rank: f"{context}: shard.grad {was}"}, hint_on_shape)
        if not nearly_equal(grad, expected, tolerance_of([mean])):
            zeros = torch.zeros_like(expected), "It is all zeros. Hint: which tensor did backward() write into?"
            mistakes = [*first(rank, index, mean), *mistakes_in_a_mean(mean, index, rows[rank]), zeros]
            evidence = f"{context}: shard.grad is wrong: {first_difference(grad, expected)}"
            raise Wrong({rank: evidence}, cause_of(grad, mistakes, otherwise))
    return mean


def judge_second_calls(further: dict[int, list[Again]], hint: str) -> None:
    """Check that further calls, which each rank has made, have done nothing.

    Raises:
        Wrong: If one has sent anything or changed shard.grad.
    """
    for rank, own in further.items():
        for again in own:
            does = f"sends {describe_calls(again.calls)}" if again.calls else "changes shard.grad"
            evidence = f"{again.what} {does}; expected it to do nothing"
            expect({rank: again}, lambda call: call.same and not call.calls, evidence, hint)
