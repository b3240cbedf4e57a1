"""Check what a function of chapter 01 sends: how much, to which ranks, and in how many rounds or turns."""

import math
from collections.abc import Sequence

import torch

from shared import c10d
from shared.checks.collectives.probes import STEPS, short_name
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.wire import instrumentation

_TODAYS_NAMES = {  # the hooks record these collectives under their older names
    "reduce_scatter_tensor": c10d.reduce_scatter_single.__name__,
    "all_gather_into_tensor": c10d.all_gather_single.__name__,
}


def budget(piece: str, elements: int, size: int) -> tuple[int, int]:
    """Return how many messages a rank may send, and how many elements each may have."""
    if piece in STEPS:
        return 1, elements
    if piece == "ring_all_gather":
        return size - 1, elements
    return (2 if piece == "ring_all_reduce" else 1) * (size - 1), -(-elements // size)


def judge_far(piece: str, size: int, calls_of: list[list[instrumentation.Call]]) -> None:
    message, own = f"on {size} ranks, 1000 elements", torch.empty(1000)
    if piece == "tree_broadcast":
        return judge_tree(dict(enumerate(calls_of)), 0, 4000, message)
    for rank, calls in enumerate(calls_of):
        judge_neighbors(rank, calls, tuple(range(size)))
        judge_volume(piece, rank, calls, own, size, message)
    if piece in STEPS:
        judge_turns(calls_of, message)


def reject_others(rank: int, calls: list[instrumentation.Call], allowed: tuple[str, ...], hint: str) -> None:
    others = sorted({_TODAYS_NAMES.get(call.op, call.op) for call in calls} - set(allowed))
    if others:
        raise Wrong({rank: f"{', '.join(others)} was called; expected only {' and '.join(allowed)}"}, hint)


def reject_collectives(rank: int, calls: list[instrumentation.Call]) -> None:
    hint = "Sends and receives are enough. Hint: which call is neither?"
    reject_others(rank, calls, instrumentation.POINT_TO_POINT, hint)


def judge_neighbors(rank: int, calls: list[instrumentation.Call], members: tuple[int, ...]) -> None:
    reject_collectives(rank, calls)
    index = members.index(rank)
    neighbor = {"send": members[(index + 1) % len(members)], "recv": members[index - 1]}
    for call in calls:
        if call.partner is None:
            raise Wrong({rank: f"{call} accepts messages from any rank; expected only rank {neighbor['recv']}"})
        if call.partner != neighbor[call.op]:
            raise Wrong(
                {rank: f"{call}; expected only messages to rank {neighbor['send']} and from rank {neighbor['recv']}"},
                "Hint: in a ring, which neighbor does a rank send to, and which one does it receive from?",
            )


def judge_volume(
    piece: str, rank: int, calls: list[instrumentation.Call], own: torch.Tensor, size: int, context: str
) -> None:
    messages, elements = budget(piece, own.numel(), size)
    divides = own.numel() % size == 0
    for op, verb in (("send", "sent"), ("recv", "received")):
        own_calls = [call for call in calls if call.op == op]
        total_bytes, most_bytes = sum(call.payload_bytes for call in own_calls), messages * elements * own.itemsize
        if (len(own_calls), total_bytes) == (messages, most_bytes):
            continue
        if not divides and len(own_calls) <= messages and total_bytes <= most_bytes:
            continue  # padding need not be sent
        target = f"{messages} message{'s' if messages != 1 else ''}, {most_bytes} bytes" if messages else "no message"
        limit = target if divides else f"at most {target}"
        evidence = f"{context}: {verb} {describe_calls(own_calls)}; expected {limit}"
        raise Wrong({rank: evidence}, _volume_hint(own_calls, messages, elements, own))


def _volume_hint(own_calls: list[instrumentation.Call], messages: int, elements: int, own: torch.Tensor) -> str:
    if elements < own.numel() and any(math.prod(call.shape) == own.numel() for call in own_calls):
        return "One message holds the whole tensor. Hint: how much of it does the neighbor need in this step?"
    if len(own_calls) < messages:
        return "Hint: how many steps are there, and how do the other ranks' chunks reach this rank?"
    if len(own_calls) == messages and {call.dtype for call in own_calls} != {short_name(own.dtype)}:
        return "Hint: which dtype is sent?"
    return "Hint: how many steps are there, and how many elements are sent in each?"


def judge_tree(calls_of: dict[int, list[instrumentation.Call]], src: int, each_bytes: int, context: str) -> None:
    size, sends = len(calls_of), {}
    for rank, calls in calls_of.items():
        reject_collectives(rank, calls)
        sends[rank] = [call for call in calls if call.op == "send"]
        if len(calls) - len(sends[rank]) > (rank != src):
            times = f"{len(calls) - len(sends[rank])} message{'s' if len(calls) - len(sends[rank]) > 1 else ''}"
            message = f"{context}: this rank received {times}; expected {int(rank != src)}"
            raise Wrong({rank: message}, "Hint: which ranks already have the tensor?")
    all_bytes = sum(call.payload_bytes for calls in sends.values() for call in calls)
    if (sum(map(len, sends.values())), all_bytes) != (size - 1, each_bytes * (size - 1)):
        raise Wrong(
            {rank: f"{context}: sent {describe_calls(calls)}" for rank, calls in sends.items()},
            f"All ranks together should send {size - 1} messages of {each_bytes} bytes. "
            "Hint: which ranks do not have the tensor yet?",
        )
    took, rounds = count_rounds(sends, src), math.ceil(math.log2(size))
    if took > rounds:
        raise Wrong(
            {rank: f"{context}: sent to {_listed([c.partner for c in calls])}" for rank, calls in sends.items()},
            f"That takes {took} rounds; expected {rounds}. Hint: which ranks have the tensor but do not send it?",
        )


def _listed(partners: list[int]) -> str:
    return f"rank {', then '.join(map(str, partners))}" if partners else "no rank"


def count_rounds(sends: dict[int, list[instrumentation.Call]], src: int) -> int:
    """Count the rounds until all ranks have the tensor, if each rank sends one message per round."""
    has_it_after, waiting = {src: 0}, [src]
    while waiting:
        sender = waiting.pop()
        for number, call in enumerate(sends[sender], 1):
            if call.partner is not None and call.partner not in has_it_after:
                has_it_after[call.partner] = has_it_after[sender] + number
                waiting.append(call.partner)
    return max(has_it_after.values())


def reject_handles(rank: int, calls: list[instrumentation.Call]) -> None:
    """Check that a rank launched every message with dist.send or dist.recv, which return when it is complete."""
    if launched := sorted({f"i{call.op}" for call in calls if call.is_async}):
        verb = "was" if len(launched) == 1 else "were"
        message = f"{' and '.join(launched)} {verb} called; expected only send and recv"
        raise Wrong({rank: message}, "Hint: which of your calls returns before its message is complete?")


def judge_turns(calls_of: list[list[instrumentation.Call]], context: str) -> None:
    """Check the number of turns that the launches of each rank take if every call waits for the other side."""
    most = 2 if len(calls_of) % 2 == 0 else 3
    took = count_turns([[(call.op, call.partner) for call in calls] for calls in calls_of])
    if took is None or took > most:
        order = {rank: f"{context}: {', then '.join(map(str, calls))}" for rank, calls in enumerate(calls_of)}
        problem = f"That takes {took} turns; expected {most}." if took else "If every call blocked, this would hang."
        raise Wrong(order, f"{problem} Hint: which ranks can send or receive in the very first turn?")


def count_turns(orders: Sequence[Sequence[tuple[str, int | None]]]) -> int | None:
    """Count the turns until all messages complete if a rank takes part in one at a time; None if they hang."""
    left, turns = [list(order) for order in orders], 0
    while any(left):
        heads = {rank: order[0] for rank, order in enumerate(left) if order}
        sends = [(r, other) for r, (op, other) in heads.items() if op == "send" and other is not None]
        met = [(r, other) for r, other in sends if heads.get(other) == ("recv", r)]
        if not met:
            return None
        for sender, receiver in met:
            left[sender].pop(0)
            left[receiver].pop(0)
        turns += 1
    return turns
