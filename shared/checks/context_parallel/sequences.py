"""Check shard_sequence and unshard_sequence: which tokens a rank gets, and what is sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of
from shared.wire import instrumentation, sent_bytes_of

# -- which tokens each rank has, and how a check cuts and compares whole sequences


def chunks_of(index: int, size: int, balanced: bool) -> list[int]:
    """Return the numbers of a rank's chunks, of 2N chunks in zigzag order if balanced, else of N."""
    return [index, 2 * size - 1 - index] if balanced else [index]


def tokens_of(index: int, size: int, balanced: bool, length: int) -> list[int]:
    """Return the positions of a rank's tokens in the whole sequence."""
    chunk = length // (2 * size if balanced else size)
    return [chunk * number + token for number in chunks_of(index, size, balanced) for token in range(chunk)]


def shard(whole: torch.Tensor, dim: int, index: int, size: int, balanced: bool) -> torch.Tensor:
    tokens = tokens_of(index, size, balanced, whole.shape[dim])
    return whole.index_select(dim, torch.tensor(tokens)).clone()


def order_name(balanced: bool) -> str:
    return "balanced" if balanced else "not balanced"


def judge(found: Mapping[int, object], expected: dict[int, torch.Tensor], what: str, hint, tolerance=1e-10) -> None:
    """Compare a tensor of each rank with what it should be.

    Args:
        found: The tensors, by global rank.
        expected: What they should be.
        what: What they are.
        hint: A function of a rank and its tensor that returns a hint.
        tolerance: Relative to the largest value.

    Raises:
        Wrong: If one differs.
    """
    wrong, hints = {}, []
    for rank, tensor in found.items():
        right = expected[rank]
        if not isinstance(tensor, torch.Tensor):
            raise Wrong({rank: f"{what}: expected a tensor, got {type(tensor).__name__}"})
        if tensor.shape != right.shape:
            wrong[rank] = f"{what} has the shape {list(tensor.shape)}, expected {list(right.shape)}"
        elif tensor.isnan().any():
            wrong[rank] = f"{what}: element {int(tensor.isnan().flatten().nonzero()[0])} is nan"
        elif not nearly_equal(tensor, right, tolerance):
            wrong[rank] = f"{what}: {first_difference(tensor, right, tolerance)}"
        else:
            continue
        hints.append(hint(rank, tensor))
    if wrong:
        raise Wrong(wrong, next((each for each in hints if each), ""))


HINT_ON_ZIGZAG = "Hint: into how many chunks is the sequence cut, and which two of them does this rank get?"
HINT_ON_SWAPPED = "The two chunks are right, but in the wrong order. Hint: which of them comes first?"
HINT_ON_OTHER_ORDER = "It is in the other order. Hint: which lines depend on `balanced`?"
HINT_ON_RANK = "These are the tokens of another rank. Hint: whose rank does `dist.get_rank` return here?"
HINT_ON_REVERSED = "Hint: in which order do the later chunks arrive, from rank 0 to rank N − 1?"


@dataclass(frozen=True)
class Sequence:
    """A tensor, and the dimension along which it is a sequence."""

    shape: tuple[int, ...]
    dim: int
    balanced: bool = True
    dtype: torch.dtype = torch.float64
    in_subgroup: bool = False
    records: bool = False

    def draw(self, attempt: Attempt) -> torch.Tensor:
        draw = torch.Generator().manual_seed(attempt.draw_seed())
        if self.dtype == torch.int64:
            return torch.randint(1000, self.shape, generator=draw)
        return torch.randn(self.shape, generator=draw, dtype=torch.float64).to(self.dtype)

    def __str__(self) -> str:
        return f"shape {list(self.shape)} along dim {self.dim}, {order_name(self.balanced)}"


@dataclass
class Outcome:
    result: Any
    kept: bool  # whether the argument is unchanged
    sent_bytes: float
    gradient: torch.Tensor | None = None  # of the argument


def probe(piece, case: Sequence, tensor: torch.Tensor) -> Outcome | None:
    """Call the piece on this rank. Return None outside of the group."""
    group, member = join_subgroup(case.in_subgroup)
    if not member:
        return None
    tensor = tensor.to(device_here()).requires_grad_(case.records)
    before = tensor.detach().clone()
    options = {} if group is None else {"group": group}
    options |= {} if case.balanced else {"balanced": False}
    with instrumentation.listening() as calls:
        result = piece(tensor, case.dim, **options)
        instrumentation.synchronize()
    sent_bytes = sum(sent_bytes_of(call, torch.distributed.get_rank()) for call in calls)
    found = Outcome(result, torch.equal(before, tensor.detach()), sent_bytes)
    if isinstance(result, torch.Tensor):
        found.result = result.detach().cpu().clone()
    if case.records and isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
        assert tensor.grad is not None, "the argument has no gradient after backward()"
        found.gradient = tensor.grad.cpu()
    torch.distributed.barrier(group)
    return found


def try_to_shard(attempt: Attempt, case: Sequence) -> dict[int, Outcome]:
    """Shard one sequence, and judge what each rank gets."""
    members = members_of(attempt, case.in_subgroup)
    whole, size = case.draw(attempt), len(members)
    context = called_alone(attempt) if case.in_subgroup else str(case)
    found = attempt.run(probe, case, whole, context=context)
    expected = {rank: shard(whole, case.dim, index, size, case.balanced) for index, rank in enumerate(members)}

    def hint(rank: int, result: torch.Tensor) -> str:
        if any(torch.equal(result, each) for each in expected.values()):
            return HINT_ON_RANK
        if torch.equal(torch.cat(result.chunk(2, case.dim)[::-1], case.dim), expected[rank]):
            return HINT_ON_SWAPPED
        others = [shard(whole, case.dim, index, size, not case.balanced) for index in range(size)]
        if any(torch.equal(result, each) for each in others):
            return HINT_ON_OTHER_ORDER
        return HINT_ON_ZIGZAG if case.balanced else ""

    results = {rank: found[rank].result for rank in members}
    judge(results, expected, f"{case}: the shard", hint)
    _judge_argument({rank: found[rank] for rank in members}, case)
    return {rank: found[rank] for rank in members}


def _judge_argument(found: dict[int, Outcome], case: Sequence) -> None:
    if changed := {rank: f"{case}: the argument was changed" for rank, each in found.items() if not each.kept}:
        raise Wrong(changed, "Hint: which tensor do you write to?")


shards_on_two_ranks = on_each(try_to_shard, Sequence((1, 8), 1))


def shards_in_both_orders(attempt: Attempt) -> None:
    length = 2 * attempt.world_size * attempt.random.randint(1, 4)
    for balanced in (True, False):
        try_to_shard(attempt, Sequence((2, length, 3), 1, balanced))
        try_to_shard(attempt, Sequence((2, 3, length, 2), -2, balanced, torch.bfloat16))
        try_to_shard(attempt, Sequence((length,), 0, balanced, torch.int64))
    odd = attempt.world_size * 3  # N divides it, and 2N does not
    try_to_shard(attempt, Sequence((2, odd), 1, balanced=False))


def shards_in_a_group(attempt: Attempt) -> None:
    size = len(members_of(attempt, True))
    for balanced in (True, False):
        try_to_shard(attempt, Sequence((2, 4 * size), 1, balanced, in_subgroup=True))


def shards_pass_gradients(attempt: Attempt) -> None:
    case = Sequence((2, 4 * attempt.world_size), 1, records=True)
    for index, (rank, found) in enumerate(try_to_shard(attempt, case).items()):
        message = f"{case}: the shard does not require a gradient, although the sequence does"
        if found.gradient is None:
            raise Wrong({rank: message}, "Hint: which line takes the tensor out of the graph?")
        expected = torch.zeros(case.shape, dtype=torch.float64)
        own = shard(torch.arange(case.shape[1]), 0, index, attempt.world_size, True)
        expected[:, own] = 1
        judge({rank: found.gradient}, {rank: expected}, f"{case}: the gradient of the sequence", lambda *_: "")


def shard_rejects_other_lengths(attempt: Attempt) -> None:
    size = attempt.world_size
    cases = [Sequence((2, 2 * size * 3 + size), 1), Sequence((2, size * 3 + 1), 1, False)]
    for case in cases[: 2 if size > 1 else 1]:
        expect_error(attempt, probe, case, [case.draw(attempt)] * size, str(case))


def expect_error(attempt: Attempt, probe_it, case, tensors: list, context: str) -> None:
    """Expect a ValueError on every rank.

    Args:
        probe_it: A probe that gets the case and the tensors of its rank.
        case: The case.
        tensors: The tensors of each rank.
        context: What is tried.
    """
    own = [each if isinstance(each, tuple) else (each,) for each in tensors]
    found = attempt.run(probe_error, probe_it, case, per_rank=own, context=context)
    raised = {rank: f"{context}: {each}; expected a ValueError" for rank, each in enumerate(found) if each}
    if raised:
        raise Wrong(raised, "Hint: which given function compares and checks the shapes, and is it still called?")


def probe_error(piece, probe_it, case, *tensors: torch.Tensor) -> str:
    """Return what happened instead of a ValueError, or ""."""
    try:
        probe_it(piece, case, *tensors)
    except ValueError as error:
        return "" if str(error) else "a ValueError without a message"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    return "no error"


def try_to_unshard(attempt: Attempt, case: Sequence) -> dict[int, Outcome]:
    """Unshard one sequence, and judge what each rank gets."""
    members = members_of(attempt, case.in_subgroup)
    whole, size = case.draw(attempt), len(members)
    shards = {rank: shard(whole, case.dim, index, size, case.balanced) for index, rank in enumerate(members)}
    own = [(shards.get(rank, whole),) for rank in range(attempt.world_size)]
    context = called_alone(attempt) if case.in_subgroup else str(case)
    found = attempt.run(probe, case, per_rank=own, context=context)
    in_rank_order = torch.cat(list(shards.values()), case.dim)

    def hint(rank: int, result: torch.Tensor) -> str:
        if torch.equal(result, in_rank_order):
            return "The shards are concatenated in rank order. Hint: where in the sequence does each chunk belong?"
        return HINT_ON_REVERSED if case.balanced else HINT_ON_OTHER_ORDER

    results = {rank: found[rank].result for rank in members}
    judge(results, dict.fromkeys(members, whole), f"{case}: the sequence", hint)
    _judge_argument({rank: found[rank] for rank in members}, case)
    return {rank: found[rank] for rank in members}


unshards_on_two_ranks = on_each(try_to_unshard, Sequence((1, 8), 1))


def unshards_in_both_orders(attempt: Attempt) -> None:
    length = 2 * attempt.world_size * attempt.random.randint(1, 4)
    for balanced in (True, False):
        try_to_unshard(attempt, Sequence((2, length, 3), 1, balanced))
        try_to_unshard(attempt, Sequence((2, 3, length, 2), -2, balanced, torch.bfloat16))
        try_to_unshard(attempt, Sequence((length,), 0, balanced, torch.int64))
    try_to_unshard(attempt, Sequence((2, attempt.world_size * 3), 1, balanced=False))


def unshards_in_a_group(attempt: Attempt) -> None:
    size = len(members_of(attempt, True))
    for balanced in (True, False):
        try_to_unshard(attempt, Sequence((2, 4 * size), 1, balanced, in_subgroup=True))


def unshard_sends_each_shard_once(attempt: Attempt) -> None:
    size, length = attempt.world_size, 2 * attempt.world_size * attempt.random.randint(5, 9)
    case = Sequence((3, length), 1)
    most_bytes = 3 * length * 8 * (size - 1) / size
    for rank, found in try_to_unshard(attempt, case).items():
        if found.sent_bytes > most_bytes + 1:
            message = f"{case}: sent {found.sent_bytes:,.0f} bytes; expected at most {most_bytes:,.0f}"
            raise Wrong({rank: message}, "Hint: how often does each rank need each shard?")


def unshard_rejects_unequal_shards(attempt: Attempt) -> None:
    size = attempt.world_size
    odd = Sequence((2, 3), 1)
    expect_error(attempt, probe, odd, [odd.draw(attempt)] * size, "shards of 3 tokens, balanced")
    whole = Sequence((2, 4), 1).draw(attempt)
    shorter = [whole[:, :2] if rank == size - 1 else whole for rank in range(size)]
    expect_error(attempt, probe, odd, shorter, f"4 tokens on each rank but the last one, which has 2, of {size} ranks")
