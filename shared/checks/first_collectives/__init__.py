"""Checks for chapter 00: the first collectives.

The notebook's kernel draws the values and gives each rank only its own, so a rank can get the right result only through
communication. Every message is counted.
"""

import functools

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls, first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.engine.framework import Exercise
from shared.checks.first_collectives import judging
from shared.checks.first_collectives.judging import (
    EXACT,
    FLOAT32_TOLERANCE,
    LENGTHS,
    broadcast_cause,
    common_cause,
    draw_tensors,
    is_close,
    judge_arguments,
    judge_numbers,
    mean_cause,
    probe_broadcast,
    probe_loss,
    probe_mean,
    probe_numbers,
    with_article,
)
from shared.wire import instrumentation

MOST_VALUES = 9
ROUNDING = 1e-12  # float64, added up in another order

sum_over_ranks = Exercise("0.1", "sum_over_ranks", first="values")
global_mean = Exercise("0.2", "global_mean", first="values")
pass_right = Exercise("0.3", "pass_right", first="values")
log_mean_loss = Exercise("0.4", "log_mean_loss", first="values")
broadcast_by_hand = Exercise("0.5", "broadcast_by_hand", first="values")


# -- 0.1


def _draw_number(attempt: Attempt) -> float:
    """Draw a number of 30 binary digits: float64 adds a few of them exactly, but float32 has too few digits."""
    return attempt.random.randint(2**29, 2**30 - 1) / 1024


@sum_over_ranks.check("values")
def the_sum_is_exact_on_every_rank(attempt: Attempt) -> None:
    """The function is called twice, because the first call must not change the result of the second.

    In the second call, all numbers are negative.
    """
    own = [(_draw_number(attempt), -_draw_number(attempt)) for _ in range(attempt.world_size)]
    found = attempt.run(probe_numbers, per_rank=own)
    for turn in (0, 1):
        every = [values[turn] for values in own]
        previous = sum(values[0] for values in own)

        def cause(rank: int, value: float, every=every, turn=turn, previous=previous) -> str:
            total = sum(every)
            if is_close(value, total / attempt.world_size) and attempt.world_size > 1:
                return "It is the mean. Hint: should anything be divided here?"
            if turn == 1 and (is_close(value, total + previous) or abs(value - total) >= previous / 2):
                return "The first call was right, but the second is not. Hint: what does the first call leave behind?"
            if abs(value - total) <= FLOAT32_TOLERANCE * abs(total):
                return "Only about 7 digits are right. Hint: which dtype does torch.tensor(0.1) have?"
            return common_cause(value, every[rank], every) or (
                "Hint: what does each rank send, and which ranks get the result?"
            )

        judge_numbers([each[turn].result for each in found], sum(every), EXACT, cause)


@sum_over_ranks.check("wire", world_sizes=(2, 4))
def the_sum_costs_one_message(attempt: Attempt) -> None:
    own = [(_draw_number(attempt),) for _ in range(attempt.world_size)]
    for rank, (called,) in enumerate(attempt.run(probe_numbers, per_rank=own)):
        _judge_one_all_reduce(rank, called.calls, 8)


def _judge_one_all_reduce(rank: int, calls: list[instrumentation.Call], payload_bytes: int) -> None:
    if [(call.op, call.payload_bytes) for call in calls] == [("all_reduce", payload_bytes)]:
        return
    message = f"{describe_calls(calls)}; expected 1 message (all_reduce), {payload_bytes} bytes"
    hint = ""
    if len(calls) > 1:
        hint = "Hint: can one tensor hold several numbers?" if payload_bytes > 8 else ""
    if any(call.op != "all_reduce" for call in calls):
        hint = "Hint: which single collective gives every rank the sum?"
    elif len(calls) == 1 and 2 * calls[0].payload_bytes == payload_bytes:
        one_number = payload_bytes == 16 and calls[0].shape in ((), (1,))
        hint = "Hint: which two numbers must be sent?" if one_number else "Hint: which dtype is sent?"
    raise Wrong({rank: message}, hint)


# -- 0.2


def _draw_shares(attempt: Attempt, one_empty: bool = False) -> list[torch.Tensor]:
    """Draw shares of different sizes.

    Args:
        one_empty: Whether one of several ranks holds no values.
    """
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    most = attempt.sizes.pick(MOST_VALUES, range(100, 3_000))
    counts = attempt.random.sample(range(1, most + 1), attempt.world_size)
    if one_empty and attempt.world_size > 1:
        counts[attempt.random.randrange(attempt.world_size)] = 0
    return [3 + torch.randn(count, dtype=torch.float64, generator=generator) for count in counts]


@global_mean.check("values")
def every_value_counts_once(attempt: Attempt) -> None:
    for one_empty in (False, True):
        own = _draw_shares(attempt, one_empty)
        found = attempt.run(probe_mean, per_rank=[(values,) for values in own])
        expected = torch.cat(own).mean().item()
        cause = functools.partial(mean_cause, own)
        judge_numbers([each.result for each in found], expected, ROUNDING, cause)


@global_mean.check("argument")
def the_values_are_unchanged(attempt: Attempt) -> None:
    own = _draw_shares(attempt)
    judge_arguments(attempt.run(probe_mean, per_rank=[(values,) for values in own]), own)


@global_mean.check("wire", world_sizes=(2, 4))
def the_mean_costs_one_message(attempt: Attempt) -> None:
    own = [(values,) for values in _draw_shares(attempt)]
    for rank, result in enumerate(attempt.run(probe_mean, per_rank=own)):
        _judge_one_all_reduce(rank, result.calls, 16)


# -- 0.3

pass_right.check("values")(judging.each_rank_gets_its_left_neighbors_tensor)
pass_right.check("waits", world_sizes=(2, 4))(judging.it_returns_when_both_messages_are_done)
pass_right.check("argument", world_sizes=(2, 3))(judging.the_argument_is_unchanged)
pass_right.check("wire", world_sizes=(2, 3, 4))(judging.one_message_out_and_one_in)


# -- 0.4


@log_mean_loss.check("values")
def rank_0_gets_the_mean(attempt: Attempt) -> None:
    own = _draw_losses(attempt)
    found = [each.result for each in attempt.run(probe_loss, per_rank=[(loss,) for loss in own])]
    expected = sum(own) / len(own)

    def cause(_rank: int, value: float) -> str:
        if abs(value - sum(own)) <= FLOAT32_TOLERANCE * sum(own) and len(own) > 1:
            return f"It is {len(own)} times too large. Hint: did you return the sum or the mean?"
        return common_cause(value, own[0], own)

    judge_numbers(found[:1], expected, FLOAT32_TOLERANCE, cause)
    others = {rank: f"returned {with_article(kind)}; expected None" for rank, (kind, _) in enumerate(found) if rank}
    wrong = {rank: message for rank, message in others.items() if found[rank][0] != "NoneType"}
    if wrong:
        raise Wrong(wrong, "Hint: which lines may run on rank 0 only, and which must run on every rank?")


def _draw_losses(attempt: Attempt) -> list[float]:
    """Draw numbers that float32 can hold exactly."""
    return [attempt.random.randint(1, 9_999) / 256 for _ in range(attempt.world_size)]


@log_mean_loss.check("argument")
def the_loss_is_unchanged_for_backward(attempt: Attempt) -> None:
    own = _draw_losses(attempt)
    for rank, result in enumerate(attempt.run(probe_loss, per_rank=[(loss,) for loss in own])):
        if result.loss != own[rank]:
            raise Wrong(
                {rank: f"the loss was {own[rank]:g} before the call and is {result.loss:g} after it"},
                "Hint: all_reduce overwrites its argument. Does the tensor that you pass share memory with the loss?",
            )
        if result.gradient != 1.0:
            message = f"after the call, loss.backward() gives a gradient of {result.gradient:g}; expected 1"
            raise Wrong({rank: message})


@log_mean_loss.check("wire", world_sizes=(2, 4))
def logging_costs_one_message(attempt: Attempt) -> None:
    """A reduce to rank 0 passes as well as an all_reduce."""
    own = [(loss,) for loss in _draw_losses(attempt)]
    for rank, result in enumerate(attempt.run(probe_loss, per_rank=own)):
        calls = result.calls
        if len(calls) != 1 or calls[0].op not in ("all_reduce", "reduce") or calls[0].payload_bytes > 8:
            raise Wrong({rank: f"{describe_calls(calls)}; expected 1 message of at most 8 bytes"})


# -- 0.5


@broadcast_by_hand.check("values")
def every_rank_has_the_tensor_of_src(attempt: Attempt) -> None:
    for src in range(attempt.world_size):
        rows = attempt.random.randint(1, 500)
        own = [tensor.reshape((rows, 2) if src % 2 else (-1,)) for tensor in draw_tensors(attempt, 2 * rows)]
        found = attempt.run(probe_broadcast, src, per_rank=[(tensor,) for tensor in own])
        tensors = [each.tensor for each in found]
        wrong = {
            rank: f"src={src}: {first_difference(tensor, own[src], EXACT)}"
            for rank, tensor in enumerate(tensors)
            if not torch.equal(tensor, own[src])
        }
        if wrong:
            raise Wrong(wrong, broadcast_cause(tensors, own, list(wrong)))


@broadcast_by_hand.check("wire", world_sizes=(1, 2, 3, 4))
def n_minus_1_messages_in_total(attempt: Attempt) -> None:
    src = attempt.random.randrange(attempt.world_size)
    own = [(tensor,) for tensor in draw_tensors(attempt, attempt.sizes.pick(100, LENGTHS))]
    payload_bytes = own[src][0].nbytes
    found = [each.calls for each in attempt.run(probe_broadcast, src, per_rank=own)]
    calls = [call for calls_of_rank in found for call in calls_of_rank]
    sends, others = [c for c in calls if c.op == "send"], {c.op for c in calls} - {"send", "recv"}
    if others:
        raise Wrong(f"{', '.join(sorted(others))} was called; expected only send and recv")
    expected = attempt.world_size - 1
    if len(sends) != expected or sum(call.payload_bytes for call in sends) != payload_bytes * expected:
        raise Wrong(
            {
                rank: f"src={src}: sent {describe_calls([c for c in calls_of_rank if c.op == 'send'])}"
                for rank, calls_of_rank in enumerate(found)
            },
            f"All ranks together should send {expected} messages of {payload_bytes} bytes. "
            "Hint: when a rank sends a message, which ranks do not have the tensor yet?",
        )
