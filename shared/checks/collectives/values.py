"""Check the values that the functions of chapter 01 compute, and how they behave in a call."""

import math

import torch

from shared.checks.collectives.probes import (
    GIVE_BACK,
    LATE_S,
    SLICED,
    STEPS,
    STRIDED,
    TRANSPOSED,
    Called,
    Setting,
    named,
    probe_gather_around,
)
from shared.checks.collectives.results import (
    any_source,
    describe_setting,
    draw,
    even_shape,
    groups,
    run,
    sources,
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

# -- check how the functions of chapter 01 behave in a call: groups, waiting, arguments, memory and autograd


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
        reject_collectives(rank, found.calls)
    most = 1 if attempt.piece == "tree_broadcast" else budget(attempt.piece, math.prod(shape), size)[0]
    for number in {attempt.random.randint(1, most), most}:
        setting = Setting(takes_late=(other, number), src=src)
        (tries,) = try_and_judge(attempt, setting, own := draw(attempt, shape))
        sender = next(r for r, found in enumerate(tries) if any(_goes_to(call, other) for call in found.calls))
        if number == most and device_here().type == "cpu" and tries[sender].took_s < LATE_S / 2:
            message = (
                f"{describe_setting(setting, own[0])}: the call returned before rank {other} had received its message"
            )
            raise Wrong({sender: message}, "Hint: do you call wait() on the handle of every isend?")


def _goes_to(call: instrumentation.Call, rank: int) -> bool:
    return call.op == "send" and call.partner == rank


def the_argument_is_unchanged(attempt: Attempt) -> None:
    for setting, own, tries in try_varied_calls(attempt):
        for rank, found in tries.items():
            if not torch.equal(found.argument, own[rank]):
                message = first_difference(found.argument, own[rank], 0.0)
                message = f"{describe_setting(setting, own[rank])}: the argument was changed: {message}"
                raise Wrong({rank: message}, _HINT_ON_ARGUMENT)
            if found.written:
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


def _judge_memory(rank: int, found: Called, context: str, alone: bool) -> None:
    if found.shares_with:
        raise Wrong(
            {rank: f"{context}: the result shares memory with the {found.shares_with}; expected memory of its own"},
            "Hint: which line allocates the memory of the result?"
            + (" Does that line also run if there is only one rank?" if alone else ""),
        )
    if found.changed_later:
        raise Wrong(
            {rank: f"{context}: a later call changed the result of an earlier one"},
            "Hint: which line allocates the memory of the result, and how often does it run?",
        )
    if found.tensor is not None and found.holds_bytes > 2 * found.tensor.nbytes + 64:
        many = f"a result of {found.tensor.nbytes} bytes keeps {found.holds_bytes} bytes in memory"
        raise Wrong({rank: f"{context}: {many}"}, "Hint: is the result a view of a larger tensor?")


def no_gradient_is_recorded(attempt: Attempt) -> None:
    setting, own = Setting(records=True, src=any_source(attempt)), draw(attempt, even_shape(attempt))
    for rank, found in enumerate(try_and_judge(attempt, setting, own)[0]):
        if found.records and attempt.piece in GIVE_BACK:
            raise Wrong(
                {rank: "if the argument requires a gradient, the result requires one, too, or is an inference tensor"},
                "Hint: what does @torch.no_grad() do?",
            )
        if found.switched_off:
            raise Wrong({rank: "after the call, autograd is still disabled"}, "Hint: which line enables it again?")


HINT_ON_LENGTHS = "Hint: how long is the chunk that a rank receives, and how long is the tensor that it receives into?"


def right_where_n_divides(attempt: Attempt) -> None:
    shapes = [even_shape(attempt), (4, 3, 4)][: 1 if attempt.piece == "ring_all_gather" else 2]  # a shard is flat
    long = (12 * attempt.sizes.pick(10_000, range(5_000, 30_000)),)  # Every world size up to 4 divides it.
    for src in sources(attempt):
        try_and_judge(attempt, Setting(src=src), *(draw(attempt, shape) for shape in [*shapes, long]))


def receivers_lose_their_old_values(attempt: Attempt) -> None:
    """A value of nan stays nan, whatever is added to it. This call also leaves out `src`, to test its default."""
    own = draw(attempt, even_shape(attempt))
    try_and_judge(attempt, Setting(), [own[0], *(torch.full_like(tensor, torch.nan) for tensor in own[1:])])


def each_rank_gets_its_left_neighbors_tensor(attempt: Attempt) -> None:
    rows, long = attempt.sizes.pick(10, range(2, 50)), attempt.sizes.pick(100_000, range(50_000, 300_000))
    for shape, dtype in (((rows, 100), torch.int64), ((1,), torch.bfloat16), ((long,), torch.float32)):
        try_and_judge(attempt, Setting(), draw(attempt, shape, dtype))


def right_for_any_size(attempt: Attempt) -> None:
    """Try sizes that the world size does not divide, fewer elements than ranks, and no elements at all."""
    size, flat = attempt.world_size, attempt.piece == "ring_all_gather"
    for shapes in ([(5 * size + 1,), (4 * size - 1,), (3, size + 2)], [(size + 1,), (1,)], [(), (0,)]):
        kept = [shape for shape in shapes if len(shape) == 1 or not flat]
        try_and_judge(attempt, Setting(src=any_source(attempt)), *(draw(attempt, shape) for shape in kept))


def chunks_of_other_lengths_are_gathered(attempt: Attempt) -> None:
    """In an all-reduce, the last chunks may be shorter than the first, or empty."""
    for numel in (4 * attempt.world_size - 1, attempt.world_size + 1):
        (flat,) = draw(attempt, (numel,))[:1]
        size = -(-numel // attempt.world_size)
        own = [flat[index * size : (index + 1) * size] for index in range(attempt.world_size)]
        numels = [len(chunk) for chunk in own]
        context = f"gather_around() was called with chunks of {', '.join(map(str, numels))} elements"
        found = attempt.run(probe_gather_around, numels, per_rank=[(chunk.clone(),) for chunk in own], context=context)
        for rank, gathered in enumerate(found):
            if gathered is not None and not torch.equal(gathered, flat):
                message = f"{context}: {first_difference(gathered, flat, 0.0)}"
                raise Wrong({rank: message}, HINT_ON_LENGTHS)


def right_in_every_dtype(attempt: Attempt) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.int32)
    try_and_judge(
        attempt, Setting(src=any_source(attempt)), *(draw(attempt, even_shape(attempt), dtype) for dtype in dtypes)
    )


def right_or_rejected_if_not_contiguous(attempt: Attempt) -> None:
    for layout, shape in ((SLICED, (13,)), (TRANSPOSED, (3, 5)), (STRIDED, (13,))):
        if len(shape) > 1 and attempt.piece == "ring_all_gather":
            continue
        try:
            _right_or_rejected(attempt, layout, shape)
        except Wrong as wrong:
            if layout != SLICED:  # a slice is contiguous
                wrong.hint = wrong.hint or (
                    "The lines that are given make a contiguous copy of this tensor. Hint: which of your own lines use "
                    "the tensor itself instead?"
                )
            raise


def _right_or_rejected(attempt: Attempt, layout: str, shape: tuple[int, ...]) -> None:
    setting, own = Setting(layout=layout, src=any_source(attempt)), draw(attempt, shape)
    for rank, found in enumerate(try_and_judge(attempt, setting, own)[0]):
        if found.torn:
            where = "between those of the argument" if layout == STRIDED else "before or after the argument"
            raise Wrong({rank: f"{describe_setting(setting, own[0])}: elements {where} were changed"})


def every_rank_has_the_same_bits(attempt: Attempt) -> None:
    """If each rank adds up in its own order, replicas drift apart."""
    draws = [draw(attempt, (120,), dtype) for dtype in (torch.float32, torch.bfloat16)]
    for own, tries in zip(draws, try_and_judge(attempt, Setting(), *draws), strict=True):
        first, *others = [found.argument for found in tries]
        for rank, theirs in enumerate(others, 1):
            if not torch.equal(theirs, first):
                index = int((theirs != first).nonzero()[0])
                message = f"element {index} is {theirs[index].item():.9g}, but {first[index].item():.9g} on rank 0"
                raise Wrong(
                    {rank: f"{named(own[0])}: {message}"},
                    "Hint: on how many ranks is each sum computed, and what do the others receive?",
                )
