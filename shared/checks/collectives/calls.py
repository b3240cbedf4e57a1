"""Check how the functions of chapter 01 behave in a call: groups, waiting, arguments, memory and autograd."""

import math

import torch

from shared.checks.collectives.kinds import GIVE_BACK, STEPS
from shared.checks.collectives.probes import LATE_S, Setting
from shared.checks.collectives.results import (
    any_source,
    describe_setting,
    draw,
    even_shape,
    groups,
    run,
    try_and_judge,
    try_varied_calls,
    varied_calls,
)
from shared.checks.collectives.wire import budget, reject_collectives
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong
from shared.wire import instrumentation

_HINT_ON_ARGUMENT = "Hint: which tensors do you write to, and is one of them the caller's?"


def right_within_a_group(attempt: Attempt) -> None:
    for members in groups(attempt):
        if len(members) == 1 and attempt.piece in STEPS:
            continue
        for src in members if attempt.piece == "tree_broadcast" else [None]:
            try_and_judge(attempt, Setting(members=members, src=src), draw(attempt, (5 * len(members) + 1,)))


def it_returns_when_its_messages_are_done(attempt: Attempt) -> None:
    """A rank that does not wait for a late rank returns or sends incomplete data."""
    src, size = any_source(attempt), attempt.world_size
    shape = (12 * attempt.sizes.pick(100, range(50, 2_000)),)
    other = ((src or 0) + attempt.random.randrange(1, size)) % size
    (tries,) = try_and_judge(attempt, Setting(late=other if src is None else src, src=src), draw(attempt, shape))
    if attempt.piece == "direct_reduce_scatter":
        return
    for rank, found in enumerate(tries):
        reject_collectives(rank, found["calls"])
    most = 1 if attempt.piece == "tree_broadcast" else budget(attempt.piece, math.prod(shape), size)[0]
    for number in {attempt.random.randint(1, most), most}:
        setting = Setting(takes_late=(other, number), src=src)
        (tries,) = try_and_judge(attempt, setting, own := draw(attempt, shape))
        sender = next(r for r, found in enumerate(tries) if any(_goes_to(call, other) for call in found["calls"]))
        if number == most and device_here().type == "cpu" and tries[sender]["took_s"] < LATE_S / 2:
            message = (
                f"{describe_setting(setting, own[0])}: the call returned before rank {other} had received its message"
            )
            raise Wrong({sender: message}, "Hint: do you call wait() on the handle of every isend?")


def _goes_to(call: instrumentation.Call, rank: int) -> bool:
    return call.op == "send" and call.partner == rank


def the_argument_is_unchanged(attempt: Attempt) -> None:
    for setting, own, tries in try_varied_calls(attempt):
        for rank, found in tries.items():
            if not torch.equal(found["argument"], own[rank]):
                message = first_difference(found["argument"], own[rank], 0.0)
                message = f"{describe_setting(setting, own[rank])}: the argument was changed: {message}"
                raise Wrong({rank: message}, _HINT_ON_ARGUMENT)
            if found.get("written"):
                message = f"{describe_setting(setting, own[rank])}: the argument was overwritten and then restored"
                raise Wrong({rank: message}, _HINT_ON_ARGUMENT)


def the_result_is_new_memory(attempt: Attempt) -> None:
    """In repeated calls, a result shares memory neither with the argument nor with an earlier result."""
    shape = even_shape(attempt)  # the same each time, because code that caches buffers usually does so by size
    settings = [(Setting(), [draw(attempt, shape) for _ in range(4)]), *varied_calls(attempt)]
    for setting, draws in settings:
        for own, tries in zip(draws, run(attempt, setting, *draws), strict=True):
            for rank in setting.ranks(attempt.world_size):
                alone = len(setting.ranks(attempt.world_size)) == 1
                _judge_memory(rank, tries[rank], describe_setting(setting, own[rank]), alone)


def _judge_memory(rank: int, found: dict, context: str, alone: bool) -> None:
    if found.get("shares with"):
        raise Wrong(
            {rank: f"{context}: the result shares memory with the {found['shares with']}; expected memory of its own"},
            "Hint: which line allocates the memory of the result?"
            + (" Does that line also run if there is only one rank?" if alone else ""),
        )
    if found["changed_later"]:
        raise Wrong(
            {rank: f"{context}: a later call changed the result of an earlier one"},
            "Hint: which line allocates the memory of the result, and how often does it run?",
        )
    if found["tensor"] is not None and found["holds_bytes"] > 2 * found["tensor"].nbytes + 64:
        many = f"a result of {found['tensor'].nbytes} bytes keeps {found['holds_bytes']} bytes in memory"
        raise Wrong({rank: f"{context}: {many}"}, "Hint: is the result a view of a larger tensor?")


def no_gradient_is_recorded(attempt: Attempt) -> None:
    setting, own = Setting(records=True, src=any_source(attempt)), draw(attempt, even_shape(attempt))
    for rank, found in enumerate(try_and_judge(attempt, setting, own)[0]):
        if found["records"] and attempt.piece in GIVE_BACK:
            raise Wrong(
                {rank: "if the argument requires a gradient, the result requires one, too, or is an inference tensor"},
                "Hint: what does @torch.no_grad() do?",
            )
        if found["switched_off"]:
            raise Wrong({rank: "after the call, autograd is still disabled"}, "Hint: which line enables it again?")
