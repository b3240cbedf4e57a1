"""Call the first collectives on a rank, recognize mistakes in their results, and check pass_right (exercise 0.3)."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong, is_a_transfer_to_itself
from shared.deadlines import scaled
from shared.wire import instrumentation

# -- check the numbers that the first collectives return, and recognize common mistakes from a wrong result


FLOAT32_TOLERANCE = 1e-6  # float32 has about 7 digits, so the error of a few additions is smaller than this


def judge_numbers(found: list[tuple[str, Any]], expected: float, tolerance: float, cause_of) -> None:
    """Check that every rank's result is a float within the tolerance.

    Args:
        found: The type and the value of each rank's result.
        expected: The expected value.
        tolerance: The relative tolerance.
        cause_of: Returns a hint for a rank and its wrong value.

    Raises:
        Wrong: If a result is not.
    """
    wrong, hints = {}, []
    for rank, (kind, value) in enumerate(found):
        if kind != "float":
            wrong[rank] = f"returned {with_article(kind)}; expected a float"
            hints.append("Hint: what does tensor.item() do?" if kind == "Tensor" else "")
        elif not abs(value - expected) <= tolerance * max(1.0, abs(expected)):
            wrong[rank] = "returned {}, expected {}".format(*_distinguishable(value, expected))
            hints.append(cause_of(rank, value))
    if wrong:
        raise Wrong(wrong, max(hints, key=len))


def _distinguishable(found: float, expected: float) -> tuple[str, str]:
    """Format two numbers with 6 digits, or with all digits if they would look the same."""
    short = f"{found:.6g}", f"{expected:.6g}"
    return short if short[0] != short[1] else (repr(found), repr(expected))


def with_article(kind: str) -> str:
    return "None" if kind == "NoneType" else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def is_close(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-9 * max(1.0, abs(other))


def common_cause(value: float, own: float, every: list[float]) -> str:
    """Recognize common mistakes in a number that should be the sum or a mean over the ranks."""
    if len(every) == 1:
        return ""
    if value == own:
        return "It is this rank's own value. Hint: which tensor holds the result of the collective?"
    if value == max(every):
        return "It is the largest of all ranks' values. Hint: which reduce operation does the collective use?"
    if value in every:
        return f"It is rank {every.index(value)}'s value. Hint: what do the other ranks contribute?"
    if is_close(value, own * len(every)):
        return f"It is {len(every)} times this rank's own value. Hint: what do the other ranks contribute?"
    return ""


def mean_cause(own: list[torch.Tensor], rank: int, value: float) -> str:
    everything, mine = torch.cat(own), own[rank]
    total, means = everything.sum().item(), [values.mean().item() for values in own if len(values)]
    shares = f"The ranks hold {', '.join(str(len(values)) for values in own)} values. "
    if value != value:
        return shares + "The mean of no values is nan. Hint: what should a rank send if it holds no values?"
    if is_close(value, sum(means) / len(means)) or is_close(value, sum(means) / len(own)):
        return shares + "It is the mean of the ranks' means. Hint: does every value have the same weight in that mean?"
    empty = [len(values) for values in own].count(0)
    if empty and is_close(value, total / (len(everything) + empty)):
        return shares + "Hint: what does a rank without values add to the number of values?"
    if is_close(value, total):
        return "It is the sum. Hint: what must it be divided by?"
    if is_close(value, total / len(own)):
        return shares + "It is the sum divided by the number of ranks. Hint: how many values does the sum contain?"
    if len(mine) and is_close(value, total / len(mine)):
        return shares + "It is the sum divided by this rank's number of values. Hint: whose values are in the sum?"
    if len(mine) and is_close(value, mine.mean().item()):
        return "It is the mean of this rank's own values. Hint: which tensor holds the result of the collective?"
    if abs(value - total / len(everything)) <= FLOAT32_TOLERANCE * abs(value):
        return "Only about 7 digits are right. Hint: which dtype do you send?"
    return shares + "Hint: which two numbers must a rank send to the others?"


def passing_cause(result: torch.Tensor, own: list[torch.Tensor], rank: int, right: int) -> str:
    if torch.equal(result, own[rank]):
        return "It is this rank's own tensor. Hint: which tensor receives the message, and which one is returned?"
    if torch.equal(result, own[right]):
        return "It is the right neighbor's tensor. Hint: which rank sends to which?"
    for other, tensor in enumerate(own):
        if torch.equal(result, tensor):
            return f"It is rank {other}'s tensor. Hint: which rank is the right neighbor of the last rank?"
    if bool((result == -1).any()):
        return (
            "The check wrote −1 into the left neighbor's tensor as soon as pass_right() had returned there. "
            "Hint: when may a tensor that is being sent be changed?"
        )
    return "Hint: is the message complete when you return the tensor?"


def broadcast_cause(found: list[torch.Tensor], own: list[torch.Tensor], wrong_ranks: list[int]) -> str:
    for sender, tensor in enumerate(own):
        if all(torch.equal(theirs, tensor) for theirs in found):
            return f"All ranks have rank {sender}'s tensor. Hint: which line uses src?"
    if all(torch.equal(found[rank], own[rank]) for rank in wrong_ranks):
        return "It is the rank's own tensor, unchanged. Hint: into which tensor do you receive the message?"
    return ""


# -- call one of the first collectives on a rank, and record its result, its messages and its argument afterwards


LATE_S = scaled(0.2)  # how late one rank is in the checks named "waits"


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device_here(), copy=True)


@dataclass
class Called:
    """One call of a function."""

    result: tuple[str, Any]  # the name of its type, and its value if it is a tensor or a number
    calls: list[instrumentation.Call]


@dataclass
class CalledOnTensor(Called):
    argument: torch.Tensor  # as it is after the call


@dataclass
class Logged(Called):
    loss: float  # as it is after the call
    gradient: float  # of the model's weight, after backward()


@dataclass
class Broadcast:
    tensor: torch.Tensor
    calls: list[instrumentation.Call]


def probe_numbers(function, *values) -> list[Called]:
    """Call a function with each value in turn."""
    found = []
    for value in values:
        with instrumentation.listening() as calls:
            result = _described(function(value))
        found.append(Called(result, calls))
    return found


def _described(result) -> tuple[str, Any]:
    """Return the name of the result's type, and its value if it is a tensor or a number."""
    value = result.detach().cpu() if isinstance(result, torch.Tensor) else result
    return type(result).__name__, value if isinstance(value, (torch.Tensor, float, int)) else None


def probe_mean(global_mean, values: torch.Tensor) -> CalledOnTensor:
    argument = _on_device(values)
    (found,) = probe_numbers(global_mean, argument)
    return CalledOnTensor(found.result, found.calls, argument.cpu())


def probe_pass(pass_right, late_rank: int | None, mine: torch.Tensor) -> CalledOnTensor:
    """Pass one tensor to the right. One rank may be late. The argument is overwritten as soon as the call returns."""
    argument = _on_device(mine)
    dist.barrier()
    if dist.get_rank() == late_rank:
        time.sleep(LATE_S)
    with instrumentation.listening() as calls:
        result = pass_right(argument)
    result = result.clone() if isinstance(result, torch.Tensor) else result
    kept = argument.cpu().clone()
    argument.fill_(-1)
    dist.barrier()  # no rank may free its tensors while a message is still in flight
    return CalledOnTensor(_described(result), calls, kept)


def probe_loss(log_mean_loss, value: float) -> Logged:
    """Log the loss of a model with one weight, and then call backward() on it, as a training step does."""
    weight = _on_device(torch.tensor(value)).requires_grad_()
    loss = weight * 1.0
    with instrumentation.listening() as calls:
        result = log_mean_loss(loss)
    kept = loss.item()
    loss.backward()
    assert weight.grad is not None
    return Logged(_described(result), calls, kept, weight.grad.item())


def probe_broadcast(broadcast_by_hand, src: int, mine: torch.Tensor) -> Broadcast:
    argument = _on_device(mine)
    with instrumentation.listening() as calls:
        broadcast_by_hand(argument, src)
    return Broadcast(argument.cpu(), calls)


EXACT = 0.0
LENGTHS = range(50, 20_000)  # of tensors, if they are drawn
_NO_SUCH_RANK = "IndexError: tuple index out of range"  # from batch_isend_irecv, for a peer outside the group


def draw_tensors(attempt: Attempt, elements: int) -> list[torch.Tensor]:
    """Draw one tensor per rank. Their values are between 100 and 101 on rank 0, 200 and 201 on rank 1, and so on."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    return [100.0 * (rank + 1) + torch.rand(elements, generator=generator) for rank in range(attempt.world_size)]


def judge_arguments(found: list[CalledOnTensor], own: list[torch.Tensor]) -> None:
    wrong = {
        rank: f"the argument was changed: {first_difference(result.argument, own[rank], EXACT)}"
        for rank, result in enumerate(found)
        if not torch.equal(result.argument, own[rank])
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
        _judge_passed([result.result for result in found], own)


def _judge_passed(found: list[tuple[str, Any]], own: list[torch.Tensor]) -> None:
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
        _judge_passed([result.result for result in found], own)
    except Wrong as wrong:
        raise Wrong(f"rank {late} called it {LATE_S:g} s late\n{wrong.evidence}", wrong.hint) from None


def the_argument_is_unchanged(attempt: Attempt) -> None:
    own = draw_tensors(attempt, attempt.sizes.pick(1000, LENGTHS))
    judge_arguments(attempt.run(probe_pass, None, per_rank=[(tensor,) for tensor in own]), own)


def one_message_out_and_one_in(attempt: Attempt) -> None:
    own = draw_tensors(attempt, attempt.sizes.pick(1000, LENGTHS))
    for rank, result in enumerate(attempt.run(probe_pass, None, per_rank=[(tensor,) for tensor in own])):
        left, right = (rank - 1) % len(own), (rank + 1) % len(own)
        found = sorted((call.op, call.partner, call.payload_bytes) for call in result.calls)
        if found != [("recv", left, own[left].nbytes), ("send", right, own[rank].nbytes)]:
            message = ", ".join(str(call) for call in result.calls) or "no message"
            expected = f"a send to rank {right} and a recv from rank {left}, {len(own[rank])} elements each"
            raise Wrong(
                {rank: f"{message}; expected {expected}"},
                "One send and one receive per rank are enough. Hint: which call sends more than that?",
            )
