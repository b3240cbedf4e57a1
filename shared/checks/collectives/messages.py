"""Check the messages that the functions of chapter 01 send: how many, to which ranks, and whether at the same time."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

from shared import ranks
from shared.checks.collectives.probes import STEPS, Setting
from shared.checks.collectives.results import describe_setting, draw, run, try_varied_calls
from shared.checks.collectives.wire import (
    budget,
    judge_far,
    judge_neighbors,
    judge_tree,
    judge_turns,
    judge_volume,
    reject_handles,
    reject_others,
)
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.steps import count_steps
from shared.wire import instrumentation

# -- simulate worlds that are larger than this machine's: one process plays every rank in turn, and nothing is sent
#
# torch's `fake` process group completes every call immediately. So the values mean nothing, and only the recorded
# messages are checked.


WORLD_SIZES = (5, 7, 8)


def probe_far(piece, arguments: int, elements: int) -> dict[int, list[list[instrumentation.Call]]]:
    """Call the function as each rank of each world. Run this on a rank that is in no process group.

    Args:
        piece: The student's function.
        arguments: The number of tensors to call it with.
        elements: The number of elements of each tensor.

    Returns:
        What each rank launched, by world size.
    """
    return {size: [_part_of(rank, size, piece, arguments, elements) for rank in range(size)] for size in WORLD_SIZES}


def _part_of(rank: int, size: int, piece, arguments: int, elements: int) -> list[instrumentation.Call]:
    with _fake_group(rank, size), instrumentation.listening() as calls:
        piece(*(torch.ones(elements) for _ in range(arguments)))
    return calls


@contextlib.contextmanager
def _fake_group(rank: int, size: int):
    # torch 2.14 has no stub for it.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # pyright: ignore[reportAttributeAccessIssue]

    refusals = instrumentation.before_launch[:]
    instrumentation.before_launch.clear()  # these hooks belong to the group that this rank has left
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    completed = mock.patch.object(dist.Work, "is_completed", lambda work: True)  # it is False after a fake wait()
    try:
        with completed:
            yield
    finally:
        dist.destroy_process_group()
        instrumentation.before_launch[:] = refusals
        instrumentation.reset()


def as_many_bytes_as_the_formula_says(attempt: Attempt) -> None:
    for setting, own, tries in try_varied_calls(attempt):
        members = setting.ranks(attempt.world_size)
        for rank, found in tries.items():
            judge_neighbors(rank, found.calls, members)
            judge_volume(
                attempt.piece, rank, found.calls, own[rank], len(members), describe_setting(setting, own[rank])
            )


def all_ranks_send_at_the_same_time(attempt: Attempt) -> None:
    """Steps are counted from each rank's launches and waits. Alternating sends and receives, as in 1.6, are fine."""
    (tries,) = run(attempt, Setting(), draw(attempt, (48,)))
    took = count_steps({rank: found.events for rank, found in enumerate(tries)})
    messages = budget(attempt.piece, 48, attempt.world_size)[0]
    if took is None or took > 2 * messages:
        noun, expected = "steps", f"{messages}, or {2 * messages} if each rank sends and receives one after the other"
        if attempt.piece == "ring_step_in_turns":
            noun, expected = "turns", str(2 * messages)
        if took is None:
            raise Wrong("a rank waits for a message that no rank sends")
        raise Wrong(
            f"from the first message to the last, it takes {took} {noun}; expected {expected}",
            f"Hint: which ranks have nothing to do in the first {noun[:-1]}?",
        )


def as_few_messages_among_more_ranks(attempt: Attempt) -> None:
    """A rank that is in no process group simulates worlds with more ranks than this machine has."""
    by_standing = ranks.current().world_size - 1
    if by_standing < 1:
        return
    arguments = 2 if attempt.piece in STEPS else 1
    context = f"simulated on {', '.join(map(str, WORLD_SIZES))} ranks"
    (worlds,) = attempt.run(probe_far, arguments, 1000, targets=[by_standing], context=context)
    for size, calls_of in worlds.items():
        judge_far(attempt.piece, size, calls_of)


def one_all_to_all(attempt: Attempt) -> None:
    for setting, own, tries in try_varied_calls(attempt):
        size = len(tries)
        for rank, found in tries.items():
            most_bytes = size * -(-own[rank].numel() // size) * own[rank].itemsize
            calls = found.calls
            hint = "Hint: which chunk does each rank need from every other rank?"
            reject_others(rank, calls, ("all_to_all_single", "all_to_all"), hint)
            if len(calls) != 1 or calls[0].payload_bytes > most_bytes:
                message = f"{describe_setting(setting, own[rank])}: {describe_calls(calls)}"
                raise Wrong({rank: f"{message}; expected 1 message of at most {most_bytes} bytes"})


def n_minus_1_messages_in_few_rounds(attempt: Attempt) -> None:
    for setting, own, tries in try_varied_calls(attempt):
        calls_of = {rank: found.calls for rank, found in tries.items()}
        judge_tree(calls_of, setting.src or 0, own[0].nbytes, describe_setting(setting, own[0]))


def few_turns_with_blocking_calls(attempt: Attempt) -> None:
    (tries,) = run(attempt, Setting(), own := draw(attempt, (attempt.sizes.pick(100, range(50, 2_000)),)))
    for rank, found in enumerate(tries):
        reject_handles(rank, found.calls)
    judge_turns([found.calls for found in tries], describe_setting(Setting(), own[0]))
