"""Check pass_right, which sends a tensor to the right neighbor, in exercise 0.3."""

import math

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong, is_a_transfer_to_itself
from shared.checks.first_collectives.causes import passing_cause, with_article
from shared.checks.first_collectives.probes import LATE_S, probe_pass

EXACT = 0.0
LENGTHS = range(50, 20_000)  # of tensors, if they are drawn
_NO_SUCH_RANK = "IndexError: tuple index out of range"  # from batch_isend_irecv, for a peer outside the group


def draw_tensors(attempt: Attempt, elements: int) -> list[torch.Tensor]:
    """Draw one tensor per rank. Their values are between 100 and 101 on rank 0, 200 and 201 on rank 1, and so on."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    return [100.0 * (rank + 1) + torch.rand(elements, generator=generator) for rank in range(attempt.world_size)]


def judge_arguments(found: list[dict], own: list[torch.Tensor]) -> None:
    wrong = {
        rank: f"the argument was changed: {first_difference(result['argument'], own[rank], EXACT)}"
        for rank, result in enumerate(found)
        if not torch.equal(result["argument"], own[rank])
    }
    if wrong:
        raise Wrong(wrong, "Hint: which of your calls work in place?")


def each_rank_gets_its_left_neighbors_tensor(attempt: Attempt) -> None:
    rows, long = attempt.sizes.pick(10, range(2, 50)), attempt.sizes.pick(1_000_000, range(500_000, 2_000_000))
    for shape, dtype, sign in (((1,), torch.float32, 1), ((rows, 100), torch.int64, -1), ((long,), torch.float32, 1)):
        own = [sign * tensor.to(dtype).reshape(shape) for tensor in draw_tensors(attempt, math.prod(shape))]
        try:
            found = attempt.run(probe_pass, None, per_rank=[(tensor,) for tensor in own])
        except Wrong as wrong:
            if attempt.world_size == 1 and is_a_transfer_to_itself(wrong.evidence):
                wrong.hint = "Hint: if there is only one rank, who is its neighbor?"
            elif _NO_SUCH_RANK in wrong.evidence:
                wrong.hint = "Hint: who is the right neighbor of the last rank, and the left neighbor of rank 0?"
            raise
        _judge_passed([result["result"] for result in found], own)


def _judge_passed(found: list[tuple[str, object]], own: list[torch.Tensor]) -> None:
    wrong, hints = {}, []
    for rank, (kind, result) in enumerate(found):
        left, right = (rank - 1) % len(own), (rank + 1) % len(own)
        expected = own[left]
        if kind != "Tensor":
            wrong[rank] = f"returned {with_article(kind)}; expected a tensor"
        elif (result.shape, result.dtype) != (expected.shape, expected.dtype):
            wrong[rank] = (
                f"returned shape {list(result.shape)}, {result.dtype}; "
                f"rank {left} passed shape {list(expected.shape)}, {expected.dtype}"
            )
        elif not torch.equal(result, expected):
            wrong[rank] = f"shape {list(expected.shape)}: {first_difference(result, expected, EXACT)}, from rank {left}"
            hints.append(passing_cause(result, own, rank, right))
    if wrong:
        raise Wrong(wrong, max(hints, key=len, default=""))


def it_returns_when_both_messages_are_done(attempt: Attempt) -> None:
    """One rank is late. Its right neighbor must wait for its message, and its left neighbor until it receives."""
    own = draw_tensors(attempt, attempt.sizes.pick(1000, LENGTHS))
    late = attempt.random.randrange(attempt.world_size)
    found = attempt.run(probe_pass, late, per_rank=[(tensor,) for tensor in own])
    try:
        _judge_passed([result["result"] for result in found], own)
    except Wrong as wrong:
        raise Wrong(f"rank {late} called it {LATE_S:g} s late\n{wrong.evidence}", wrong.hint) from None


def the_argument_is_unchanged(attempt: Attempt) -> None:
    own = draw_tensors(attempt, attempt.sizes.pick(1000, LENGTHS))
    judge_arguments(attempt.run(probe_pass, None, per_rank=[(tensor,) for tensor in own]), own)


def one_message_out_and_one_in(attempt: Attempt) -> None:
    own = draw_tensors(attempt, attempt.sizes.pick(1000, LENGTHS))
    for rank, result in enumerate(attempt.run(probe_pass, None, per_rank=[(tensor,) for tensor in own])):
        left, right = (rank - 1) % len(own), (rank + 1) % len(own)
        found = sorted((call.op, call.partner, call.payload_bytes) for call in result["calls"])
        if found != [("recv", left, own[left].nbytes), ("send", right, own[rank].nbytes)]:
            message = ", ".join(str(call) for call in result["calls"]) or "no message"
            expected = f"a send to rank {right} and a recv from rank {left}, {len(own[rank])} elements each"
            raise Wrong(
                {rank: f"{message}; expected {expected}"},
                "One send and one receive per rank are enough. Hint: which call sends more than that?",
            )
