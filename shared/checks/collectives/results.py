"""Call a function of chapter 01 with a tensor on every rank, and check the results.

A result is compared with a float64 sum, and `mixture.py` finds out what a wrong result consists of.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from shared.checks.collectives import mixture
from shared.checks.collectives.mixture import Parts, Slot, cut
from shared.checks.collectives.probes import (
    CALLED_WITH,
    IN_PLACE,
    LATE_S,
    STEPS,
    Called,
    Setting,
    named,
    probe_collective,
    probe_step,
    short_name,
)
from shared.checks.engine.attempts import CALLED_ALONE, Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong, is_a_transfer_to_itself
from shared.checks.engine.subgroups import SUBGROUPS
from shared.wire import instrumentation

Draw = list[torch.Tensor]  # one tensor per rank
_HINTS_ON_UNKNOWN_VALUES = {
    "ring_all_gather": "Hint: which memory is each shard received into, and is it that of `gathered`?",
    "tree_broadcast": "Hint: does a rank have the whole tensor when it sends it, and what does it receive into?",
    "direct_reduce_scatter": (
        "Hint: which elements of the received tensor come from which rank? And is it different from the one you send?"
    ),
}
_HINT_ON_OWN_SHARD = "Hint: which chunk has data before the first step?"
_HINT_ON_HANDLES = "Hint: do you call wait() on the handle of each call, before you use its result?"
_HINT_ON_INDICES = "With src=0, it works. Hint: is the number that this line passes an index or a rank?"
_HINT_ON_VIEWS = "Hint: what is in the memory of this rank's chunk of the tensor when gather_around() sends it?"


# -- drawing


def draw(attempt: Attempt, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Draw:
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    count = attempt.world_size
    if not dtype.is_floating_point:  # integers that no float can hold exactly, but a sum of four of them still fits
        most = torch.iinfo(dtype).max // 4
        return [torch.randint(-most, most, shape, generator=generator, dtype=dtype) for _ in range(count)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def even_shape(attempt: Attempt) -> tuple[int, ...]:
    """Draw a shape whose number of elements is divisible by every world size up to 4."""
    return (12 * attempt.random.randint(2, 9),)


def sources(attempt: Attempt) -> list[int | None]:
    return list(range(attempt.world_size)) if attempt.piece == "tree_broadcast" else [None]


def any_source(attempt: Attempt) -> int | None:
    return attempt.random.choice(sources(attempt))


def describe_setting(setting: Setting, *tensors: torch.Tensor) -> str:
    """Describe what was tried: one call, or several calls, of which one failed."""
    described = "; ".join(map(named, tensors))
    parts = [f"in one of these calls: {described}" if len(tensors) > 1 else described, setting.layout]
    parts += [f"src={setting.src}"] if setting.src is not None else []
    if setting.members is not None:
        parts.append(f"{CALLED_ALONE} the group of ranks {', '.join(map(str, setting.members))}")
    parts += [f"rank {setting.late} called it {LATE_S:g} s late"] if setting.late is not None else []
    parts += [f"rank {setting.takes_late[0]} received a message late"] if setting.takes_late else []
    return ", ".join(part for part in parts if part)


def groups(attempt: Attempt) -> list[tuple[int, ...]]:
    """Return groups in which careless implementations fail, and one random group."""
    size = attempt.world_size
    drawn = attempt.random.sample(range(size), attempt.random.randint(1, size - 1))
    return list(dict.fromkeys([*SUBGROUPS[size], tuple(sorted(drawn))]))


def varied_calls(attempt: Attempt) -> list[tuple[Setting, list[Draw]]]:
    """Draw many ways to call the same piece: sizes and dtypes in the whole world, then groups."""
    size, flat = attempt.world_size, attempt.piece == "ring_all_gather"
    kinds = [
        (even_shape(attempt), torch.float32),
        ((5 * size + 1,), torch.bfloat16),
        ((1,), torch.float32),
        ((48,) if flat else (4, 3, 4), torch.float64),
        ((7 * size - 1,), torch.int64),
    ]
    found = [(Setting(src=any_source(attempt)), [draw(attempt, shape, dtype) for shape, dtype in kinds])]
    for members in groups(attempt) if size in SUBGROUPS else []:
        if len(members) > 1:
            src = attempt.random.choice(members) if attempt.piece == "tree_broadcast" else None
            found.append((Setting(members=members, src=src), [draw(attempt, (5 * len(members) + 1,))]))
    return found


# -- one attempt, and its expected results


def run(attempt: Attempt, setting: Setting, *draws: Draw) -> list[tuple[Called, ...]]:
    """Call the piece once with each draw. Returns each rank's results, for each draw."""
    probe = probe_step if attempt.piece in STEPS else probe_collective
    several = describe_setting(setting, *(own[0] for own in draws))
    per_rank = list(zip(*draws, strict=True))
    try:
        found = attempt.run(probe, setting, per_rank=per_rank, context=several)
    except Wrong as wrong:
        if CALLED_WITH in wrong.evidence and len(draws) > 1:  # this note names the call that raised
            alone = describe_setting(setting)
            wrong.evidence = (f"{alone}: " if alone else "") + wrong.evidence.removeprefix(f"{several}: ")
        if len(setting.ranks(attempt.world_size)) == 1 and is_a_transfer_to_itself(wrong.evidence):
            wrong.hint = "Hint: how many steps are there if N is 1?"
        elif setting.src and setting.members is None and is_a_transfer_to_itself(wrong.evidence):  # src=0 came first
            wrong.hint = _HINT_ON_INDICES
        raise
    return list(zip(*found, strict=True))


def try_and_judge(attempt: Attempt, setting: Setting, *draws: Draw) -> list[tuple[Called, ...]]:
    """Call the piece once with each draw, and check the result of every rank of the group."""
    tries = run(attempt, setting, *draws)
    for found, own in zip(tries, draws, strict=True):
        _judge(attempt.piece, setting, found, own)
    return tries


def try_varied_calls(attempt: Attempt):
    """Run all of varied_calls(). Yields the setting, all ranks' tensors, and the results by member of the group."""
    for setting, draws in varied_calls(attempt):
        for own, tries in zip(draws, run(attempt, setting, *draws), strict=True):
            yield setting, own, {rank: tries[rank] for rank in setting.ranks(attempt.world_size)}


def _judge(piece: str, setting: Setting, found: Sequence[Called], own: Draw) -> None:
    members, wrong, hints = setting.ranks(len(own)), {}, [""]
    if any(found[rank].refused is not None for rank in members):
        return _judge_refusal(found, setting, own)
    parts = _parts(piece, own, members)
    for index, rank in enumerate(members):
        slots = _slots(piece, members, index, setting.src)
        complaint, hint = _complaint(piece, found[rank], own[rank], slots, parts, rank)
        if piece == "ring_all_reduce" and "without the other ranks'" in complaint:
            hint = "" if setting.layout else _HINT_ON_VIEWS
        if complaint:
            wrong[rank] = f"{describe_setting(setting, own[0])}: {complaint}"
            hints.append(hint)
    if wrong:
        raise Wrong(wrong, max(hints, key=len))


def _complaint(
    piece: str, found: Called, own: torch.Tensor, slots: list[Slot], parts: Parts, rank: int
) -> tuple[str, str]:
    """Return what is wrong with one rank's result, and a hint; both are empty if it is right."""
    result = found.argument if piece in IN_PLACE else found.tensor
    if result is None:
        return f"returned {found.kind.replace('NoneType', 'None')}; expected a tensor", ""
    reference = torch.cat([parts.value(slot) for slot in slots])
    shape = list(own.shape) if piece in (*IN_PLACE, *STEPS) else list(reference.shape)
    if (list(result.shape), result.dtype) != (shape, own.dtype):
        came, expected = f"{list(result.shape)}, {short_name(result.dtype)}", f"{shape}, {short_name(own.dtype)}"
        in_length = "Hint: how long is a chunk, and what is its dtype?"
        in_dtype = "Hint: which dtype does each call in your function return, for example sum()?"
        return f"the result is {came}; expected {expected}", in_dtype if list(result.shape) == shape else in_length
    result, reference = result.flatten(), reference[: result.numel()]
    if result.is_floating_point():
        within = torch.cat([parts.tolerance(slot) for slot in slots])[: result.numel()]
        off = ~((result.double() - reference).abs() <= within)
    else:
        off = result != reference
    if not off.any():
        return "", ""
    first, size = int(off.nonzero()[0]), len(parts.value(slots[0]))
    index = first // size
    stretch = result[index * size : (index + 1) * size]
    came, hint = mixture.explain(F.pad(stretch, (0, size - len(stretch))), slots[index], parts, rank)
    if not came:
        hint = _HINTS_ON_UNKNOWN_VALUES.get(piece, hint)
    if piece == "ring_all_gather" and off.view(-1, size)[slots.index(Slot(0, (rank,)))].any():
        came, hint = "This rank's own shard was overwritten.", _HINT_ON_OWN_SHARD
    if dropped := _dropped_handles(found):
        came, hint = f"{came} A handle was dropped without a call to its wait(): {dropped}.", _HINT_ON_HANDLES
    values = f"element {first} is {result[first].item():.6g}, expected {reference[first].item():.6g}."
    return f"{values} {came.strip()}".strip(), hint


def _dropped_handles(found: Called) -> str:
    """Name the operations that a call launched, if it waited for fewer of their handles, or return ""."""
    launched = [call.op for call in found.calls if call.is_async]
    if len(launched) <= sum(event.kind == "wait" for event in found.events):
        return ""
    return " or ".join(sorted({f"i{op}" if op in instrumentation.POINT_TO_POINT else op for op in launched}))


def _parts(piece: str, own: Draw, members: tuple[int, ...]) -> Parts:
    """Return the members' contributions: in chunks if they are added up, whole if they are only sent."""
    if piece in ("ring_all_gather", "tree_broadcast", *STEPS):
        noun = "shard" if piece == "ring_all_gather" else "tensor"
        return Parts({rank: [own[rank].flatten()] for rank in members}, noun)
    return Parts({rank: cut(own[rank], len(members)) for rank in members})


def _slots(piece: str, members: tuple[int, ...], index: int, src: int | None) -> list[Slot]:
    """Return the slots, in order, of which the result of the rank with this index in the group must consist."""
    if piece in STEPS:
        return [Slot(0, (members[index - 1],))]
    if piece == "tree_broadcast":
        return [Slot(0, (src or 0,))]
    if piece == "ring_all_gather":
        return [Slot(0, (rank,)) for rank in members]
    if piece == "ring_all_reduce":
        return [Slot(chunk, members) for chunk in range(len(members))]
    return [Slot(index, members)]


def _judge_refusal(found: Sequence[Called], setting: Setting, own: Draw) -> None:
    """Check that an argument is rejected on every rank, before anything has been sent or changed."""
    for rank in setting.ranks(len(own)):
        message = ""
        if found[rank].refused is None:
            message = "another rank raised a ValueError, but this rank did not"
        elif found[rank].calls:
            message = f"a ValueError was raised after {describe_calls(found[rank].calls)}"
        elif not torch.equal(found[rank].argument, own[rank]):
            message = "a ValueError was raised after the argument had been changed"
        if message:
            raise Wrong(
                {rank: f"{describe_setting(setting, own[0])}: {message}"},
                "Hint: is the argument checked on every rank, and before the first message?",
            )
