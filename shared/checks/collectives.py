"""Checks for chapter 01: collectives by hand.

The kernel draws every rank's tensor and hands each rank only its own. Every message is heard: to whom, and how
many bytes. A result is compared with a float64 sum; `mixture.py` finds out what a wrong one is made of.
"""

import contextlib
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shared import ends, ranks, rankside, tap
from shared.checks import far, mixture
from shared.checks.compare import describe_calls, first_difference
from shared.checks.framework import Attempt, Exercise, Wrong
from shared.checks.mixture import SPOILT, UNTOUCHED, Parts, Slot, cut
from shared.checks.steps import Diary, count_steps

LATE_S = 0.2  # how late one rank comes where waiting is checked
SUBGROUPS = {3: [(1, 2)], 4: [(1, 3), (0, 2, 3)]}  # a place in the group is not the rank, nor neighbours neighbours
TRANSPOSED, STRIDED = "transposed", "every other element of a larger one"
SLICED = "a piece from the middle of a larger one"
MARGIN = 3  # elements on each side of that piece

ring_step = Exercise("1.1", "ring_step", optional=True)
ring_reduce_scatter = Exercise("1.2", "ring_reduce_scatter")
ring_all_gather = Exercise("1.3", "ring_all_gather")
ring_all_reduce = Exercise("1.4", "ring_all_reduce")
tree_broadcast = Exercise("1.5", "tree_broadcast")
ring_step_in_turns = Exercise("1.6", "ring_step_in_turns", optional=True)
direct_reduce_scatter = Exercise("1.7", "direct_reduce_scatter", optional=True)

STEPS = (ring_step, ring_step_in_turns)
GIVE_BACK = (ring_reduce_scatter, ring_all_gather, direct_reduce_scatter)
IN_PLACE = (ring_all_reduce, tree_broadcast)
COLLECTIVES = (*GIVE_BACK, *IN_PLACE)
RINGS = (ring_reduce_scatter, ring_all_gather, ring_all_reduce)


Draw = list[torch.Tensor]  # one tensor per rank


def _check(exercises: tuple[Exercise, ...], name: str, **options):
    """Register one judge with several exercises."""

    def register(judge):
        for exercise in exercises:
            exercise.check(name, **options)(judge)
        return judge

    return register


def _is(piece: str, *exercises: Exercise) -> bool:
    return piece in [exercise.piece for exercise in exercises]


# -- probes: what runs on a rank, beside the student's code


@dataclass(frozen=True)
class Setting:
    """How a piece is called."""

    members: tuple[int, ...] | None = None  # a group of these ranks; None: all of them, and no group is named
    layout: str = ""  # how the argument lies in memory: alone and contiguous, or TRANSPOSED, STRIDED or SLICED
    records: bool = False  # the argument requires a gradient
    late: int | None = None  # this rank comes LATE_S after the others
    takes_late: tuple[int, int] | None = None  # (rank, n): LATE_S pass before it launches its n-th receive
    src: int | None = None  # of a broadcast

    def ranks(self, world_size: int) -> tuple[int, ...]:
        return self.members or tuple(range(world_size))


def probe_step(step, setting: Setting, *mine: torch.Tensor) -> list[dict]:
    """Send each tensor to the right, into a place that holds something else."""
    options, takes_part = _join(setting)
    tries = []
    for values in mine:
        outgoing = values.to(_device(), copy=True)
        incoming = torch.full_like(outgoing, UNTOUCHED)
        _come(setting)
        with _told_with(values), _slow(setting), _heard() as found:
            if takes_part:
                step(outgoing, incoming, **options)
        tries.append(found | {"tensor": incoming.cpu().clone(), "argument": outgoing.cpu().clone()})
        outgoing.fill_(SPOILT)
        dist.barrier()  # nobody leaves, and frees its tensors, while a message may still be under way
    return tries


def probe_collective(collective, setting: Setting, *mine: torch.Tensor) -> list[dict]:
    """Call collective with each tensor. As soon as a call returns, its argument and its result are overwritten.

    → per tensor: the result, the argument afterwards, the calls, and whether memory is shared that may not be
    """
    options, takes_part = _join(setting)
    tries, storages, results = [], {}, []
    for values in mine:
        memory, argument = _laid_out(values.to(_device(), copy=True), setting.layout)
        holds = argument.detach()  # the memory that was given, whatever the name `argument` stands for later
        argument.requires_grad_(setting.records)
        version, result, refused = argument._version, None, None
        _come(setting)
        with _told_with(values), _slow(setting), _heard() as found:
            try:
                if takes_part:
                    result = collective(argument, **options)
            except ValueError as error:
                if argument.is_contiguous():
                    raise
                refused = str(error)
        found |= {"kind": type(result).__name__, "tensor": None, "refused": refused, "records": False}
        if argument.shape != holds.shape:  # resized in place
            holds = argument.detach()
        found |= {"argument": holds.cpu().clone(), "written": argument._version != version}
        found["torn"] = _torn(memory, setting.layout)
        if isinstance(result, torch.Tensor):
            found["tensor"] = result.detach().cpu().clone()
            found["records"] = result.requires_grad or result.is_inference()
            storage = result.untyped_storage()
            found["shares with"] = storages.get(storage.data_ptr()) if result.numel() else None
            if result.numel() and storage.data_ptr() == memory.untyped_storage().data_ptr():
                found["shares with"] = "argument"
            storages[storage.data_ptr()] = "last result"
            found["holds_bytes"] = storage.nbytes()
            with torch.inference_mode(result.is_inference()):
                results.append(result.detach().fill_(SPOILT))
        holds.fill_(SPOILT)
        tries.append(found)
        dist.barrier()
    for found in tries:
        found["changed_later"] = any(bool((result != SPOILT).any()) for result in results)
    return tries


@contextlib.contextmanager
def _heard():
    """Listen to one call. → what it launched and waited for, how long it took, and whether it switched autograd off"""
    found, diary = {}, Diary()
    began_s = time.perf_counter()
    try:
        with ends.watching(diary), tap.listening(diary.launched) as calls:
            yield found
    finally:
        found |= {"calls": calls, "events": diary.events, "took_s": time.perf_counter() - began_s}
        found["switched_off"] = not torch.is_grad_enabled()
        torch.set_grad_enabled(True)


@contextlib.contextmanager
def _slow(setting: Setting):
    """Let one rank take one of its messages late, so that whoever sent it without waiting has long gone on."""
    slow_rank, number = setting.takes_late or (None, 0)
    launched = []

    def delay(call: tap.Call) -> None:
        if call.op == "recv":
            launched.append(call)
            if len(launched) == number:
                time.sleep(LATE_S)

    hooks = [delay] if dist.get_rank() == slow_rank else []
    tap.before_launch.extend(hooks)
    try:
        yield
    finally:
        for hook in hooks:
            tap.before_launch.remove(hook)


@contextlib.contextmanager
def _told_with(values: torch.Tensor):
    """Let an error say with which of several tensors it came."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(It was called with {_named(values)}.)")
        raise


def _device() -> torch.device:
    return torch.device(rankside.here.device)


def _join(setting: Setting) -> tuple[dict, bool]:
    """→ the keywords of the call, and whether this rank makes it"""
    options = {} if setting.src is None else {"src": setting.src}
    if setting.members is None:
        return options, True
    group = dist.new_group(list(setting.members))
    return options | {"group": group}, dist.get_rank() in setting.members


def _come(setting: Setting) -> None:
    """All come at the same time, or one of them late."""
    dist.barrier()
    if dist.get_rank() == setting.late:
        time.sleep(LATE_S)


def _laid_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """→ memory, and a view of it that holds values"""
    if layout == TRANSPOSED:
        memory = values.t().contiguous()
        return memory, memory.t()
    if layout in (STRIDED, SLICED):
        memory = torch.full((2 * values.numel() + 2 * MARGIN,), UNTOUCHED, dtype=values.dtype, device=values.device)
        view = memory[_places(layout, values.numel())]
        view.copy_(values)
        return memory, view
    return values, values[...]  # in place: whoever else looks at this memory sees it too


def _places(layout: str, elements: int) -> slice:
    return slice(0, 2 * elements, 2) if layout == STRIDED else slice(MARGIN, MARGIN + elements)


def _torn(memory: torch.Tensor, layout: str) -> bool:
    """Was anything written beside the argument?"""
    if layout not in (STRIDED, SLICED):
        return False
    beside = torch.ones_like(memory, dtype=torch.bool)
    beside[_places(layout, (memory.numel() - 2 * MARGIN) // 2)] = False
    return bool((memory[beside] != UNTOUCHED).any())


# -- drawing


def _draw(attempt: Attempt, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Draw:
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    count = attempt.world_size
    if not dtype.is_floating_point:  # whole numbers that no float holds; the sum of four still fits
        most = torch.iinfo(dtype).max // 4
        return [torch.randint(-most, most, shape, generator=generator, dtype=dtype) for _ in range(count)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def _even(attempt: Attempt) -> tuple[int, ...]:
    """A shape whose elements any number of ranks up to 4 divides."""
    return (12 * attempt.random.randint(2, 9),)


def _sources(attempt: Attempt) -> list[int | None]:
    return list(range(attempt.world_size)) if _is(attempt.piece, tree_broadcast) else [None]


def _any_source(attempt: Attempt) -> int | None:
    return attempt.random.choice(_sources(attempt))


def _named(tensor: torch.Tensor) -> str:
    many = f"{tensor.numel()} element{'s' if tensor.numel() != 1 else ''}"
    said = f"shape {list(tensor.shape)}" if tensor.dim() > 1 else many
    return said if tensor.dtype == torch.float32 else f"{said}, {_short(tensor.dtype)}"


def _said(setting: Setting, *tensors: torch.Tensor) -> str:
    """Name what was tried: one call, or several one after the other."""
    said = "; ".join(map(_named, tensors))
    said += f", {setting.layout}" if setting.layout else ""
    said += f", src={setting.src}" if setting.src is not None else ""
    if setting.members is not None:
        said += f", called by the group of ranks {', '.join(map(str, setting.members))}"
    said += f", rank {setting.late} came {LATE_S:g} s late" if setting.late is not None else ""
    return said + (f", rank {setting.takes_late[0]} took a message late" if setting.takes_late else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- one try, and what it should leave


def _run(attempt: Attempt, setting: Setting, *draws: Draw) -> list[list[dict]]:
    """Call the piece once with each draw. → per draw: what each rank found"""
    probe = probe_step if _is(attempt.piece, *STEPS) else probe_collective
    context = _said(setting, *(own[0] for own in draws))
    per_rank = list(zip(*draws, strict=True))
    return list(zip(*attempt.run(probe, setting, per_rank=per_rank, context=context), strict=True))


def _try(attempt: Attempt, setting: Setting, *draws: Draw) -> list[list[dict]]:
    """Call the piece once with each draw, and judge what every rank of the group has then."""
    tries = _run(attempt, setting, *draws)
    for found, own in zip(tries, draws, strict=True):
        _judge(attempt.piece, setting, found, own)
    return tries


def _judge(piece: str, setting: Setting, found: list[dict], own: Draw) -> None:
    members, wrong, hints = setting.ranks(len(own)), {}, [""]
    if any(found[rank].get("refused") is not None for rank in members):
        return _judge_refusal(found, setting, own)
    parts = _parts(piece, own, members)
    for place, rank in enumerate(members):
        slots = _slots(piece, members, place, setting.src)
        complaint, hint = _complaint(piece, found[rank], own[rank], slots, parts, rank)
        if complaint:
            wrong[rank] = f"{_said(setting, own[0])}: {complaint}"
            hints.append(hint)
    if wrong:
        raise Wrong(wrong, max(hints, key=len))


def _complaint(
    piece: str, found: dict, own: torch.Tensor, slots: list[Slot], parts: Parts, rank: int
) -> tuple[str, str]:
    """→ what is wrong with one rank's result, and a question; both empty if it is right"""
    result = found["argument" if _is(piece, *IN_PLACE) else "tensor"]
    if result is None:
        return f"gave back {found['kind'].replace('NoneType', 'None')}, expected a tensor", ""
    want = torch.cat([parts.value(slot) for slot in slots])
    shape = list(own.shape) if _is(piece, *IN_PLACE, *STEPS) else list(want.shape)
    if (list(result.shape), result.dtype) != (shape, own.dtype):
        came, expected = f"{list(result.shape)}, {_short(result.dtype)}", f"{shape}, {_short(own.dtype)}"
        return f"the result is {came}; expected {expected}", "Look at: how long is a chunk, and of which dtype?"
    result, want = result.flatten(), want[: result.numel()]
    if result.is_floating_point():
        within = torch.cat([parts.tolerance(slot) for slot in slots])[: result.numel()]
        off = ~((result.double() - want).abs() <= within)
    else:
        off = result != want
    if not off.any():
        return "", ""
    first, size = int(off.nonzero()[0]), len(parts.value(slots[0]))
    number = first // size
    stretch = result[number * size : (number + 1) * size]
    came, hint = mixture.explain(F.pad(stretch, (0, size - len(stretch))), slots[number], parts, rank)
    return f"element {first} is {result[first].item():.6g}, expected {want[first].item():.6g}. {came}".strip(), hint


def _parts(piece: str, own: Draw, members: tuple[int, ...]) -> Parts:
    """What the members bring: in chunks where it is added up, whole where it only travels."""
    if _is(piece, ring_all_gather, tree_broadcast, *STEPS):
        noun = "shard" if _is(piece, ring_all_gather) else "tensor"
        return Parts({rank: [own[rank].flatten()] for rank in members}, noun)
    return Parts({rank: cut(own[rank], len(members)) for rank in members})


def _slots(piece: str, members: tuple[int, ...], place: int, src: int | None) -> list[Slot]:
    """What the rank at this place of the group must have: one slot after the other."""
    if _is(piece, *STEPS):
        return [Slot(0, (members[place - 1],))]
    if _is(piece, tree_broadcast):
        return [Slot(0, (src or 0,))]
    if _is(piece, ring_all_gather):
        return [Slot(0, (rank,)) for rank in members]
    if _is(piece, ring_all_reduce):
        return [Slot(chunk, members) for chunk in range(len(members))]
    return [Slot(place, members)]


def _judge_refusal(found: list[dict], setting: Setting, own: Draw) -> None:
    """Whoever refuses does so on every rank, before anything has been sent or changed."""
    for rank in setting.ranks(len(own)):
        begun = found[rank]["calls"] or not torch.equal(found[rank]["argument"], own[rank])
        if found[rank]["refused"] is None or begun:
            raise Wrong(
                {rank: f"{_said(setting, own[0])}: refused with a ValueError, but this rank had begun"},
                "Look at: is it refused on every rank, and before the first message?",
            )


# -- values


@_check(COLLECTIVES, "values")
def right_where_n_divides(attempt: Attempt) -> None:
    shapes = [_even(attempt), (4, 3, 4)][: 1 if _is(attempt.piece, ring_all_gather) else 2]  # a shard is flat
    for src in _sources(attempt):
        _try(attempt, Setting(src=src), *(_draw(attempt, shape) for shape in [*shapes, (120_000,)]))


@tree_broadcast.check("receivers")
def what_a_receiver_held_is_gone(attempt: Attempt) -> None:
    """Not-a-numbers stay whatever is added to them; and src may be left out."""
    own = _draw(attempt, _even(attempt))
    _try(attempt, Setting(), [own[0], *(torch.full_like(tensor, torch.nan) for tensor in own[1:])])


@_check(STEPS, "values", world_sizes=(2, 3, 4))
def each_gets_its_left_neighbours(attempt: Attempt) -> None:
    for shape, dtype in (((10, 100), torch.int64), ((1,), torch.bfloat16), ((100_000,), torch.float32)):
        _try(attempt, Setting(), _draw(attempt, shape, dtype))


@_check(COLLECTIVES, "sizes")
def right_for_any_size(attempt: Attempt) -> None:
    """A remainder; ranks without an element of their own; no element at all."""
    size, flat = attempt.world_size, _is(attempt.piece, ring_all_gather)
    for shapes in ([(5 * size + 1,), (4 * size - 1,), (3, size + 2)], [(size + 1,), (1,)], [(), (0,)]):
        kept = [shape for shape in shapes if len(shape) == 1 or not flat]
        _try(attempt, Setting(src=_any_source(attempt)), *(_draw(attempt, shape) for shape in kept))


@_check(COLLECTIVES, "dtypes", world_sizes=(2, 4))
def right_in_every_dtype(attempt: Attempt) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.int32)
    _try(attempt, Setting(src=_any_source(attempt)), *(_draw(attempt, _even(attempt), dtype) for dtype in dtypes))


@_check(COLLECTIVES, "layout", world_sizes=(1, 2, 3))
def right_or_refused_where_memory_is_not_contiguous(attempt: Attempt) -> None:
    for layout, shape in ((SLICED, (13,)), (TRANSPOSED, (3, 5)), (STRIDED, (13,))):
        if len(shape) > 1 and _is(attempt.piece, ring_all_gather):
            continue
        setting, own = Setting(layout=layout, src=_any_source(attempt)), _draw(attempt, shape)
        for rank, found in enumerate(_try(attempt, setting, own)[0]):
            if found["torn"]:
                beside = "in between" if layout == STRIDED else "beside it"
                raise Wrong({rank: f"{_said(setting, own[0])}: the elements {beside} were changed"})


@ring_all_reduce.check("same bits", world_sizes=(3, 4))
def every_rank_has_the_same_bits(attempt: Attempt) -> None:
    """Sums that each rank takes in an order of its own let replicas drift apart."""
    draws = [_draw(attempt, (120,), dtype) for dtype in (torch.float32, torch.bfloat16)]
    for own, tries in zip(draws, _try(attempt, Setting(), *draws), strict=True):
        first, *others = [found["argument"] for found in tries]
        for rank, theirs in enumerate(others, 1):
            if not torch.equal(theirs, first):
                place = int((theirs != first).nonzero()[0])
                said = f"element {place} is {theirs[place].item():.9g}, on rank 0 it is {first[place].item():.9g}"
                raise Wrong(
                    {rank: f"{_named(own[0])}: {said}"},
                    "Look at: on how many ranks is each sum taken, and what do the others get?",
                )


# -- groups, waiting, memory


def _groups(attempt: Attempt) -> list[tuple[int, ...]]:
    """Some that careless ranks stumble in, and one that is drawn."""
    size = attempt.world_size
    drawn = attempt.random.sample(range(size), attempt.random.randint(1, size - 1))
    return list(dict.fromkeys([*SUBGROUPS[size], tuple(sorted(drawn))]))


def _variety(attempt: Attempt) -> list[tuple[Setting, list[Draw]]]:
    """The same piece under many circumstances: sizes and dtypes in the whole world, then groups."""
    size, flat = attempt.world_size, _is(attempt.piece, ring_all_gather)
    kinds = [
        (_even(attempt), torch.float32),
        ((5 * size + 1,), torch.bfloat16),
        ((1,), torch.float32),
        ((48,) if flat else (4, 3, 4), torch.float64),
        ((7 * size - 1,), torch.int64),
    ]
    found = [(Setting(src=_any_source(attempt)), [_draw(attempt, shape, dtype) for shape, dtype in kinds])]
    for members in _groups(attempt) if size in SUBGROUPS else []:
        if len(members) > 1:
            src = attempt.random.choice(members) if _is(attempt.piece, tree_broadcast) else None
            found.append((Setting(members=members, src=src), [_draw(attempt, (5 * len(members) + 1,))]))
    return found


def _each(attempt: Attempt):
    """Run the variety. → one by one: (setting, what all ranks brought, what each member of the group found)"""
    for setting, draws in _variety(attempt):
        for own, tries in zip(draws, _run(attempt, setting, *draws), strict=True):
            yield setting, own, {rank: tries[rank] for rank in setting.ranks(attempt.world_size)}


@_check((*STEPS, *COLLECTIVES), "group", world_sizes=(3, 4))
def right_within_a_group(attempt: Attempt) -> None:
    for members in _groups(attempt):
        if len(members) == 1 and _is(attempt.piece, *STEPS):
            continue
        for src in members if _is(attempt.piece, tree_broadcast) else [None]:
            _try(attempt, Setting(members=members, src=src), _draw(attempt, (5 * len(members) + 1,)))


@_check((*STEPS, *COLLECTIVES), "waits", world_sizes=(2, 4))
def it_returns_when_its_messages_are_done(attempt: Attempt) -> None:
    """Whoever does not wait for a rank that is late gives back, or has sent, what is not complete."""
    src, size, shape = _any_source(attempt), attempt.world_size, (1200,)
    other = ((src or 0) + attempt.random.randrange(1, size)) % size
    _try(attempt, Setting(late=other if src is None else src, src=src), _draw(attempt, shape))
    if _is(attempt.piece, direct_reduce_scatter):
        return
    most = 1 if _is(attempt.piece, tree_broadcast) else _budget(attempt.piece, math.prod(shape), size)[0]
    for number in {attempt.random.randint(1, most), most}:
        setting = Setting(takes_late=(other, number), src=src)
        (tries,) = _try(attempt, setting, own := _draw(attempt, shape))
        sender = next(r for r, found in enumerate(tries) if any(_goes_to(call, other) for call in found["calls"]))
        if number == most and _device().type == "cpu" and tries[sender]["took_s"] < LATE_S / 2:
            raise Wrong(
                {sender: f"{_said(setting, own[0])}: this rank came back before its message to rank {other} was taken"},
                "Look at: does every isend meet its wait()?",
            )


def _goes_to(call: tap.Call, rank: int) -> bool:
    return call.op == "send" and call.partner == rank


@_check((*STEPS, *GIVE_BACK), "argument", world_sizes=(2, 3, 4))
def what_is_given_is_kept(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        for rank, found in tries.items():
            if not torch.equal(found["argument"], own[rank]):
                said = first_difference(found["argument"], own[rank], 0.0)
                said = f"{_said(setting, own[rank])}: the argument was changed: {said}"
                raise Wrong({rank: said}, "Look at: what is written into, and is it yours?")
            if found.get("written"):
                said = f"{_said(setting, own[rank])}: the argument was written into, though it holds the same again"
                raise Wrong({rank: said}, "Look at: what is written into, and is it yours?")


@_check(GIVE_BACK, "result")
def the_result_is_new_memory(attempt: Attempt) -> None:
    """Called again and again: what is given back is neither the argument's memory nor that of an earlier result."""
    settings = [(Setting(), [_draw(attempt, _even(attempt)) for _ in range(4)]), *_variety(attempt)]
    for setting, draws in settings:
        for own, tries in zip(draws, _run(attempt, setting, *draws), strict=True):
            for rank in setting.ranks(attempt.world_size):
                _judge_memory(rank, tries[rank], _said(setting, own[rank]))


def _judge_memory(rank: int, found: dict, said: str) -> None:
    if found.get("shares with"):
        raise Wrong(
            {rank: f"{said}: the result lies in the {found['shares with']}'s memory: who changes one changes both"},
            "Look at: where, and when, is the memory for the result made? For one rank alone, too?",
        )
    if found["changed_later"]:
        raise Wrong(
            {rank: f"{said}: a later call changed the result of an earlier one"}, "Look at: whose memory is it?"
        )
    if found["tensor"] is not None and found["holds_bytes"] > 2 * found["tensor"].nbytes + 64:
        many = f"{found['tensor'].nbytes} bytes of result keep {found['holds_bytes']} bytes in memory"
        raise Wrong({rank: f"{said}: {many}"}, "Look at: is it a view? Of what?")


@_check(COLLECTIVES, "autograd", world_sizes=(1, 2))
def no_gradient_is_recorded(attempt: Attempt) -> None:
    setting, own = Setting(records=True, src=_any_source(attempt)), _draw(attempt, _even(attempt))
    for rank, found in enumerate(_try(attempt, setting, own)[0]):
        if found["records"] and _is(attempt.piece, *GIVE_BACK):
            raise Wrong(
                {rank: "with an argument that requires a gradient, the result does too, or is an inference tensor"},
                "Look at: what does @torch.no_grad() do?",
            )
        if found["switched_off"]:
            raise Wrong({rank: "after the call autograd is switched off"}, "Look at: who switches it on again?")


# -- the wire


def _budget(piece: str, elements: int, size: int) -> tuple[int, int]:
    """→ how many messages a rank sends, and of how many elements each, at most"""
    if _is(piece, *STEPS):
        return 1, elements
    if _is(piece, ring_all_gather):
        return size - 1, elements
    return (2 if _is(piece, ring_all_reduce) else 1) * (size - 1), -(-elements // size)


@_check(RINGS, "wire")
@_check(STEPS, "wire", world_sizes=(2, 3, 4))
def no_more_than_the_formula(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        members = setting.ranks(attempt.world_size)
        for rank, found in tries.items():
            _judge_neighbours(rank, found["calls"], members)
            _judge_volume(attempt.piece, rank, found["calls"], own[rank], len(members), _said(setting, own[rank]))


@_check((*RINGS, *STEPS), "at once", world_sizes=(4,))
def all_ranks_send_at_the_same_time(attempt: Attempt) -> None:
    """From what each rank launched and waited for; a rank may send and receive in turns, as in exercise 1.6."""
    (tries,) = _run(attempt, Setting(), _draw(attempt, (48,)))
    took = count_steps({rank: found["events"] for rank, found in enumerate(tries)})
    messages = _budget(attempt.piece, 48, attempt.world_size)[0]
    if took is None or took > 2 * messages:
        raise Wrong(
            f"from the first message to the last it takes {took} steps; expected {messages}, "
            f"or {2 * messages} if each rank sends and receives in turns",
            "Look at: which ranks have nothing to do in the first step?",
        )


@_check((*RINGS, tree_broadcast), "more ranks", world_sizes=(1,))
@_check((ring_step_in_turns,), "more ranks", world_sizes=(1,))
def as_sparing_among_more_ranks(attempt: Attempt) -> None:
    """Played on a rank that stands by: every rank's part in worlds that this machine has no ranks for."""
    by_standing = ranks.current().world_size - 1
    if by_standing < 1:
        return
    arguments = 2 if _is(attempt.piece, *STEPS) else 1
    context = f"played for {', '.join(map(str, far.WORLD_SIZES))} ranks"
    (worlds,) = attempt.run(far.probe_far, arguments, 1000, targets=[by_standing], context=context)
    for size, calls_of in worlds.items():
        _judge_far(attempt.piece, size, calls_of)


def _judge_far(piece: str, size: int, calls_of: list[list[tap.Call]]) -> None:
    said, own = f"among {size} ranks, 1000 elements", torch.empty(1000)
    if _is(piece, tree_broadcast):
        return _judge_tree(dict(enumerate(calls_of)), 0, 4000, said)
    for rank, calls in enumerate(calls_of):
        _judge_neighbours(rank, calls, tuple(range(size)))
        _judge_volume(piece, rank, calls, own, size, said)
    if _is(piece, *STEPS):
        _judge_turns(calls_of, said)


def _refuse_others(rank: int, calls: list[tap.Call], allowed: tuple[str, ...], hint: str) -> None:
    others = sorted({call.op for call in calls} - set(allowed))
    if others:
        raise Wrong({rank: f"{', '.join(others)} was called; expected {' and '.join(allowed)} only"}, hint)


def _judge_neighbours(rank: int, calls: list[tap.Call], members: tuple[int, ...]) -> None:
    _refuse_others(rank, calls, tap.POINT_TO_POINT, "Look at: send and recv are all it takes. What else travels?")
    place = members.index(rank)
    neighbour = {"send": members[(place + 1) % len(members)], "recv": members[place - 1]}
    for call in calls:
        if call.partner is None:
            raise Wrong({rank: f"{call} takes a message from anybody; expected: from rank {neighbour['recv']}"})
        if call.partner != neighbour[call.op]:
            raise Wrong(
                {rank: f"{call}; expected messages to rank {neighbour['send']} and from rank {neighbour['recv']} only"},
                "Look at: how many neighbours does a rank of a ring know? And on which side does it send?",
            )


def _judge_volume(piece: str, rank: int, calls: list[tap.Call], own: torch.Tensor, size: int, said: str) -> None:
    messages, elements = _budget(piece, own.numel(), size)
    divides = own.numel() % size == 0
    for op, did in (("send", "sent"), ("recv", "received")):
        heard = [call for call in calls if call.op == op]
        total_bytes, most_bytes = sum(call.payload_bytes for call in heard), messages * elements * own.itemsize
        if (len(heard), total_bytes) == (messages, most_bytes):
            continue
        if not divides and len(heard) <= messages and total_bytes <= most_bytes:
            continue  # what a chunk lacks need not be sent
        target = f"{messages} message{'s' if messages != 1 else ''}, {most_bytes} bytes" if messages else "no message"
        limit = target if divides else f"at most {target}"
        evidence = f"{said}: {did} {describe_calls(heard)}; expected {limit}"
        raise Wrong({rank: evidence}, _volume_hint(heard, messages, elements, own))


def _volume_hint(heard: list[tap.Call], messages: int, elements: int, own: torch.Tensor) -> str:
    if elements < own.numel() and any(math.prod(call.shape) == own.numel() for call in heard):
        return "There is a message with the whole tensor. Look at: how much of it does the neighbour need in this step?"
    if len(heard) < messages:
        return "Look at: how many steps are there, and how do the others' parts come here?"
    if len(heard) == messages and {call.dtype for call in heard} != {_short(own.dtype)}:
        return "Look at: which dtype is sent?"
    return "Look at: how many steps are there, and how long is the message of each?"


@direct_reduce_scatter.check("wire", world_sizes=(2, 3, 4))
def one_all_to_all(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        size = len(tries)
        for rank, found in tries.items():
            most_bytes = size * -(-own[rank].numel() // size) * own[rank].itemsize
            calls = found["calls"]
            _refuse_others(rank, calls, ("all_to_all_single", "all_to_all"), "Look at: who needs which chunk of whom?")
            if len(calls) != 1 or calls[0].payload_bytes > most_bytes:
                said = f"{_said(setting, own[rank])}: {describe_calls(calls)}"
                raise Wrong({rank: f"{said}; expected 1 message, of at most {most_bytes} bytes"})


@tree_broadcast.check("wire")
def n_minus_1_messages_in_few_rounds(attempt: Attempt) -> None:
    for setting, own, tries in _each(attempt):
        calls_of = {rank: found["calls"] for rank, found in tries.items()}
        _judge_tree(calls_of, setting.src, own[0].nbytes, _said(setting, own[0]))


def _judge_tree(calls_of: dict[int, list[tap.Call]], src: int, each_bytes: int, said: str) -> None:
    size, sends = len(calls_of), {}
    for rank, calls in calls_of.items():
        _refuse_others(rank, calls, tap.POINT_TO_POINT, "Look at: send and recv are all it takes.")
        sends[rank] = [call for call in calls if call.op == "send"]
        if len(calls) - len(sends[rank]) > (rank != src):
            raise Wrong({rank: f"{said}: received too often"}, "Look at: who has the tensor already?")
    all_bytes = sum(call.payload_bytes for calls in sends.values() for call in calls)
    if (sum(map(len, sends.values())), all_bytes) != (size - 1, each_bytes * (size - 1)):
        raise Wrong(
            {rank: f"{said}: sent {describe_calls(calls)}" for rank, calls in sends.items()},
            f"Expected: {size - 1} messages of {each_bytes} bytes in all. Look at: who still lacks the tensor?",
        )
    took, rounds = _rounds(sends, src), math.ceil(math.log2(size))
    if took > rounds:
        raise Wrong(
            {rank: f"{said}: sent to {_listed([c.partner for c in calls])}" for rank, calls in sends.items()},
            f"That takes {took} rounds; expected {rounds}. Look at: who has the tensor, and stands idle?",
        )


def _listed(partners: list[int]) -> str:
    return f"rank {', then '.join(map(str, partners))}" if partners else "nobody"


def _rounds(sends: dict[int, list[tap.Call]], src: int) -> int:
    """How many rounds it takes until all have the tensor, if a rank sends one message in each."""
    has_it_after, waiting = {src: 0}, [src]
    while waiting:
        sender = waiting.pop()
        for number, call in enumerate(sends[sender], 1):
            if call.partner not in has_it_after:
                has_it_after[call.partner] = has_it_after[sender] + number
                waiting.append(call.partner)
    return max(has_it_after.values())


@ring_step_in_turns.check("turns", world_sizes=(2, 3, 4))
def few_turns_though_everyone_waits(attempt: Attempt) -> None:
    (tries,) = _run(attempt, Setting(), own := _draw(attempt, (100,)))
    _judge_turns([found["calls"] for found in tries], _said(Setting(), own[0]))


def _judge_turns(calls_of: list[list[tap.Call]], said: str) -> None:
    """What each rank launched, in this order, taken as calls that wait for the other side."""
    most = 2 if len(calls_of) % 2 == 0 else 3
    took = _turns([[(call.op, call.partner) for call in calls] for calls in calls_of])
    if took is None or took > most:
        order = {rank: f"{said}: {', then '.join(map(str, calls))}" for rank, calls in enumerate(calls_of)}
        says = f"That takes {took} turns; expected {most}." if took else "If each call waited, that would never end."
        raise Wrong(order, f"{says} Look at: which ranks can be in a message in the very first turn?")


def _turns(orders: list[list[tuple[str, int]]]) -> int | None:
    """In how many turns all messages are done, if a rank is in one message at a time. None: they never are."""
    orders, turns = [list(order) for order in orders], 0
    while any(orders):
        heads = {rank: order[0] for rank, order in enumerate(orders) if order}
        met = [r for r, (op, other) in heads.items() if op == "send" and heads.get(other) == ("recv", r)]
        if not met:
            return None
        for sender in met:
            receiver = orders[sender].pop(0)[1]
            orders[receiver].pop(0)
        turns += 1
    return turns
