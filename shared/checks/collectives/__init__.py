"""Checks for chapter 01: collectives by hand.

The kernel draws every rank's tensor and hands each rank only its own. Every message is heard: to whom, and how
many bytes. A result is compared with a float64 sum; `mixture.py` finds out what a wrong one is made of.
"""

import math

import torch

from shared import ranks
from shared.checks.collectives import far, launched
from shared.checks.collectives.kinds import COLLECTIVES, GIVE_BACK, RINGS, STEPS
from shared.checks.collectives.probes import LATE_S, SLICED, STRIDED, TRANSPOSED, Setting, named
from shared.checks.collectives.results import Draw, any_source, draw, even_shape, run, said_of, sources, try_and_judge
from shared.checks.collectives.wire import (
    budget,
    judge_far,
    judge_neighbors,
    judge_tree,
    judge_turns,
    judge_volume,
    refuse_others,
)
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference
from shared.checks.engine.framework import Attempt, Exercise, Wrong
from shared.checks.engine.steps import count_steps
from shared.checks.engine.subgroups import SUBGROUPS
from shared.wire import instrumentation

ring_step = Exercise("1.1", "ring_step", optional=True)
ring_reduce_scatter = Exercise("1.2", "ring_reduce_scatter")
ring_all_gather = Exercise("1.3", "ring_all_gather")
ring_all_reduce = Exercise("1.4", "ring_all_reduce")
tree_broadcast = Exercise("1.5", "tree_broadcast")
ring_step_in_turns = Exercise("1.6", "ring_step_in_turns", optional=True)
direct_reduce_scatter = Exercise("1.7", "direct_reduce_scatter", optional=True)
launch_reduce_scatter = Exercise("1.8", "launch_reduce_scatter", optional=True)

EXERCISES = {
    exercise.piece: exercise
    for exercise in (
        ring_step,
        ring_reduce_scatter,
        ring_all_gather,
        ring_all_reduce,
        tree_broadcast,
        ring_step_in_turns,
        direct_reduce_scatter,
    )
}


def _check(pieces: tuple[str, ...], name: str, **options):
    """Register one judge with several exercises."""

    def register(judge):
        for piece in pieces:
            EXERCISES[piece].check(name, **options)(judge)
        return judge

    return register


# -- values


@_check(COLLECTIVES, "values")
def right_where_n_divides(attempt: Attempt) -> None:
    shapes = [even_shape(attempt), (4, 3, 4)][: 1 if attempt.piece == "ring_all_gather" else 2]  # a shard is flat
    for src in sources(attempt):
        try_and_judge(attempt, Setting(src=src), *(draw(attempt, shape) for shape in [*shapes, (120_000,)]))


@tree_broadcast.check("receivers")
def what_a_receiver_held_is_gone(attempt: Attempt) -> None:
    """Not-a-numbers stay whatever is added to them; and src may be left out."""
    own = draw(attempt, even_shape(attempt))
    try_and_judge(attempt, Setting(), [own[0], *(torch.full_like(tensor, torch.nan) for tensor in own[1:])])


@_check(STEPS, "values", world_sizes=(2, 3, 4))
def each_gets_its_left_neighbors(attempt: Attempt) -> None:
    for shape, dtype in (((10, 100), torch.int64), ((1,), torch.bfloat16), ((100_000,), torch.float32)):
        try_and_judge(attempt, Setting(), draw(attempt, shape, dtype))


@_check(COLLECTIVES, "sizes")
def right_for_any_size(attempt: Attempt) -> None:
    """A remainder; ranks without an element of their own; no element at all."""
    size, flat = attempt.world_size, attempt.piece == "ring_all_gather"
    for shapes in ([(5 * size + 1,), (4 * size - 1,), (3, size + 2)], [(size + 1,), (1,)], [(), (0,)]):
        kept = [shape for shape in shapes if len(shape) == 1 or not flat]
        try_and_judge(attempt, Setting(src=any_source(attempt)), *(draw(attempt, shape) for shape in kept))


@_check(COLLECTIVES, "dtypes", world_sizes=(2, 4))
def right_in_every_dtype(attempt: Attempt) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.int32)
    try_and_judge(
        attempt, Setting(src=any_source(attempt)), *(draw(attempt, even_shape(attempt), dtype) for dtype in dtypes)
    )


@_check(COLLECTIVES, "layout", world_sizes=(1, 2, 3))
def right_or_refused_where_memory_is_not_contiguous(attempt: Attempt) -> None:
    for layout, shape in ((SLICED, (13,)), (TRANSPOSED, (3, 5)), (STRIDED, (13,))):
        if len(shape) > 1 and attempt.piece == "ring_all_gather":
            continue
        setting, own = Setting(layout=layout, src=any_source(attempt)), draw(attempt, shape)
        for rank, found in enumerate(try_and_judge(attempt, setting, own)[0]):
            if found["torn"]:
                beside = "in between" if layout == STRIDED else "beside it"
                raise Wrong({rank: f"{said_of(setting, own[0])}: the elements {beside} were changed"})


@ring_all_reduce.check("same bits", world_sizes=(3, 4))
def every_rank_has_the_same_bits(attempt: Attempt) -> None:
    """Sums that each rank takes in an order of its own let replicas drift apart."""
    draws = [draw(attempt, (120,), dtype) for dtype in (torch.float32, torch.bfloat16)]
    for own, tries in zip(draws, try_and_judge(attempt, Setting(), *draws), strict=True):
        first, *others = [found["argument"] for found in tries]
        for rank, theirs in enumerate(others, 1):
            if not torch.equal(theirs, first):
                index = int((theirs != first).nonzero()[0])
                message = f"element {index} is {theirs[index].item():.9g}, on rank 0 it is {first[index].item():.9g}"
                raise Wrong(
                    {rank: f"{named(own[0])}: {message}"},
                    "Hint: on how many ranks is each sum taken, and what do the others get?",
                )


# -- groups, waiting, memory


def _groups(attempt: Attempt) -> list[tuple[int, ...]]:
    """Some that careless ranks stumble in, and one that is drawn."""
    size = attempt.world_size
    drawn = attempt.random.sample(range(size), attempt.random.randint(1, size - 1))
    return list(dict.fromkeys([*SUBGROUPS[size], tuple(sorted(drawn))]))


def _variety(attempt: Attempt) -> list[tuple[Setting, list[Draw]]]:
    """The same piece under many circumstances: sizes and dtypes in the whole world, then groups."""
    size, flat = attempt.world_size, attempt.piece == "ring_all_gather"
    kinds = [
        (even_shape(attempt), torch.float32),
        ((5 * size + 1,), torch.bfloat16),
        ((1,), torch.float32),
        ((48,) if flat else (4, 3, 4), torch.float64),
        ((7 * size - 1,), torch.int64),
    ]
    found = [(Setting(src=any_source(attempt)), [draw(attempt, shape, dtype) for shape, dtype in kinds])]
    for members in _groups(attempt) if size in SUBGROUPS else []:
        if len(members) > 1:
            src = attempt.random.choice(members) if attempt.piece == "tree_broadcast" else None
            found.append((Setting(members=members, src=src), [draw(attempt, (5 * len(members) + 1,))]))
    return found


def _each(attempt: Attempt):
    """Run the variety. → one by one: (setting, what all ranks brought, what each member of the group found)"""
    for setting, draws in _variety(attempt):
        for own, tries in zip(draws, run(attempt, setting, *draws), strict=True):
            yield setting, own, {rank: tries[rank] for rank in setting.ranks(attempt.world_size)}


@_check((*STEPS, *COLLECTIVES), "group", world_sizes=(3, 4))
def right_within_a_group(attempt: Attempt) -> None:
    for members in _groups(attempt):
        if len(members) == 1 and attempt.piece in STEPS:
            continue
        for src in members if attempt.piece == "tree_broadcast" else [None]:
            try_and_judge(attempt, Setting(members=members, src=src), draw(attempt, (5 * len(members) + 1,)))


@_check((*STEPS, *COLLECTIVES), "waits", world_sizes=(2, 4))
def it_returns_when_its_messages_are_done(attempt: Attempt) -> None:
    """Whoever does not wait for a rank that is late gives back, or has sent, what is not complete."""
    src, size, shape = any_source(attempt), attempt.world_size, (1200,)
    other = ((src or 0) + attempt.random.randrange(1, size)) % size
    try_and_judge(attempt, Setting(late=other if src is None else src, src=src), draw(attempt, shape))
    if attempt.piece == "direct_reduce_scatter":
        return
    most = 1 if attempt.piece == "tree_broadcast" else budget(attempt.piece, math.prod(shape), size)[0]
    for number in {attempt.random.randint(1, most), most}:
        setting = Setting(takes_late=(other, number), src=src)
        (tries,) = try_and_judge(attempt, setting, own := draw(attempt, shape))
        sender = next(r for r, found in enumerate(tries) if any(_goes_to(call, other) for call in found["calls"]))
        if number == most and device_here().type == "cpu" and tries[sender]["took_s"] < LATE_S / 2:
            message = f"{said_of(setting, own[0])}: this rank came back before its message to rank {other} was taken"
            raise Wrong({sender: message}, "Hint: does every isend meet its wait()?")


def _goes_to(call: instrumentation.Call, rank: int) -> bool:
    return call.op == "send" and call.partner == rank


@_check((*STEPS, *GIVE_BACK), "argument", world_sizes=(2, 3, 4))
def what_is_given_is_kept(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        for rank, found in tries.items():
            if not torch.equal(found["argument"], own[rank]):
                message = first_difference(found["argument"], own[rank], 0.0)
                message = f"{said_of(setting, own[rank])}: the argument was changed: {message}"
                raise Wrong({rank: message}, "Hint: what is written into, and is it yours?")
            if found.get("written"):
                message = (
                    f"{said_of(setting, own[rank])}: the argument was written into, though it holds the same again"
                )
                raise Wrong({rank: message}, "Hint: what is written into, and is it yours?")


@_check(GIVE_BACK, "result")
def the_result_is_new_memory(attempt: Attempt) -> None:
    """Called again and again: what is given back is neither the argument's memory nor that of an earlier result."""
    shape = even_shape(attempt)  # the same each time: whoever keeps memory keeps it by its size
    settings = [(Setting(), [draw(attempt, shape) for _ in range(4)]), *_variety(attempt)]
    for setting, draws in settings:
        for own, tries in zip(draws, run(attempt, setting, *draws), strict=True):
            for rank in setting.ranks(attempt.world_size):
                _judge_memory(rank, tries[rank], said_of(setting, own[rank]))


def _judge_memory(rank: int, found: dict, context: str) -> None:
    if found.get("shares with"):
        raise Wrong(
            {rank: f"{context}: the result lies in the {found['shares with']}'s memory: who changes one changes both"},
            "Hint: where, and when, is the memory for the result made? For one rank alone, too?",
        )
    if found["changed_later"]:
        raise Wrong(
            {rank: f"{context}: a later call changed the result of an earlier one"}, "Hint: whose memory is it?"
        )
    if found["tensor"] is not None and found["holds_bytes"] > 2 * found["tensor"].nbytes + 64:
        many = f"{found['tensor'].nbytes} bytes of result keep {found['holds_bytes']} bytes in memory"
        raise Wrong({rank: f"{context}: {many}"}, "Hint: is it a view? Of what?")


@_check(COLLECTIVES, "autograd", world_sizes=(1, 2))
def no_gradient_is_recorded(attempt: Attempt) -> None:
    setting, own = Setting(records=True, src=any_source(attempt)), draw(attempt, even_shape(attempt))
    for rank, found in enumerate(try_and_judge(attempt, setting, own)[0]):
        if found["records"] and attempt.piece in GIVE_BACK:
            raise Wrong(
                {rank: "with an argument that requires a gradient, the result does too, or is an inference tensor"},
                "Hint: what does @torch.no_grad() do?",
            )
        if found["switched_off"]:
            raise Wrong({rank: "after the call autograd is switched off"}, "Hint: who switches it on again?")


# -- the wire


@_check(RINGS, "wire")
@_check(STEPS, "wire", world_sizes=(2, 3, 4))
def no_more_than_the_formula(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        members = setting.ranks(attempt.world_size)
        for rank, found in tries.items():
            judge_neighbors(rank, found["calls"], members)
            judge_volume(attempt.piece, rank, found["calls"], own[rank], len(members), said_of(setting, own[rank]))


@_check((*RINGS, *STEPS), "at once", world_sizes=(4,))
def all_ranks_send_at_the_same_time(attempt: Attempt) -> None:
    """From what each rank launched and waited for; a rank may send and receive in turns, as in exercise 1.6."""
    (tries,) = run(attempt, Setting(), draw(attempt, (48,)))
    took = count_steps({rank: found["events"] for rank, found in enumerate(tries)})
    messages = budget(attempt.piece, 48, attempt.world_size)[0]
    if took is None or took > 2 * messages:
        raise Wrong(
            f"from the first message to the last it takes {took} steps; expected {messages}, "
            f"or {2 * messages} if each rank sends and receives in turns",
            "Hint: which ranks have nothing to do in the first step?",
        )


@_check((*RINGS, "tree_broadcast"), "more ranks", world_sizes=(1,))
@_check(("ring_step_in_turns",), "more ranks", world_sizes=(1,))
def as_sparing_among_more_ranks(attempt: Attempt) -> None:
    """Played on a rank that stands by: every rank's part in worlds that this machine has no ranks for."""
    by_standing = ranks.current().world_size - 1
    if by_standing < 1:
        return
    arguments = 2 if attempt.piece in STEPS else 1
    context = f"played for {', '.join(map(str, far.WORLD_SIZES))} ranks"
    (worlds,) = attempt.run(far.probe_far, arguments, 1000, targets=[by_standing], context=context)
    for size, calls_of in worlds.items():
        judge_far(attempt.piece, size, calls_of)


@direct_reduce_scatter.check("wire", world_sizes=(2, 3, 4))
def one_all_to_all(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        size = len(tries)
        for rank, found in tries.items():
            most_bytes = size * -(-own[rank].numel() // size) * own[rank].itemsize
            calls = found["calls"]
            refuse_others(rank, calls, ("all_to_all_single", "all_to_all"), "Hint: who needs which chunk of whom?")
            if len(calls) != 1 or calls[0].payload_bytes > most_bytes:
                message = f"{said_of(setting, own[rank])}: {describe_calls(calls)}"
                raise Wrong({rank: f"{message}; expected 1 message, of at most {most_bytes} bytes"})


@tree_broadcast.check("wire")
def n_minus_1_messages_in_few_rounds(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        calls_of = {rank: found["calls"] for rank, found in tries.items()}
        judge_tree(calls_of, setting.src, own[0].nbytes, said_of(setting, own[0]))


@ring_step_in_turns.check("turns", world_sizes=(2, 3, 4))
def few_turns_though_everyone_waits(attempt: Attempt) -> None:
    (tries,) = run(attempt, Setting(), own := draw(attempt, (100,)))
    judge_turns([found["calls"] for found in tries], said_of(Setting(), own[0]))


# -- launched now, waited for later

launch_reduce_scatter.check("values")(launched.each_rank_gets_its_shard_of_the_sum)
launch_reduce_scatter.check("at once", world_sizes=(2, 3))(launched.the_call_returns_at_once)
launch_reduce_scatter.check("wire", world_sizes=(3, 4))(launched.each_rank_sends_every_other_rank_one_shard)
launch_reduce_scatter.check("memory", world_sizes=(4,))(launched.little_memory_is_needed)
