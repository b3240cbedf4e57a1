"""Judging begin_reduce_scatter: it comes back at once, and what it gives back waits for this rank's part of the sum."""

from dataclasses import dataclass

import torch

from shared import memory
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import close, first_difference
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.latecomers import PATIENCE_S, Meeting, launches_unasked
from shared.checks.engine.sharded.wire import Flat, judge_rounds
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.wire import instrumentation

NUMBERS = 30_000  # of each rank's part, where memory is counted
SLACK = 1.01


@dataclass(frozen=True)
class Sums:
    """Which flat tensors are added up, by whom. parts: how many numbers each rank's part has."""

    parts: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    in_subgroup: bool = False

    def draw(self, attempt: Attempt) -> tuple[list[int], list[list[torch.Tensor]]]:
        """→ who takes part, and per rank of the world its tensors"""
        members = members_of(attempt, self.in_subgroup)
        draw = torch.Generator().manual_seed(attempt.draw_seed())
        lengths = [part * len(members) for part in self.parts]
        return members, [
            [torch.randn(length, generator=draw, dtype=torch.float64).to(self.dtype) for length in lengths]
            for _ in range(attempt.world_size)
        ]

    def __str__(self) -> str:
        said = ", then ".join(f"N · {part} numbers" for part in self.parts)
        return said if self.dtype == torch.float64 else f"{said}, {str(self.dtype).removeprefix('torch.')}"


def probe_sums(begin, sums: Sums, flats: list[torch.Tensor]) -> dict:
    """Begin all, then wait for each. → per tensor the result, and what was sent for it"""
    group, member = join_subgroup(sums.in_subgroup)
    if not member:
        return {"outside": True}
    finishes, found = [], {"calls": [], "results": [], "kind": None}
    for flat in flats:
        with instrumentation.listening() as calls:
            finishes.append(begin(flat.to(device_here()), *([group] if group is not None else [])))
        found["calls"].append(calls)
    for place, finish in enumerate(finishes):
        if not callable(finish):
            return found | {"kind": type(finish).__name__}
        with instrumentation.listening() as calls:
            result = finish()
        found["results"].append(result.detach().cpu().clone())
        found["calls"][place] += calls
    return found


def _try(attempt: Attempt, sums: Sums) -> tuple[dict[int, dict], list[list[torch.Tensor]]]:
    """→ by global rank what was found, and per rank what it brought

    Raises: Wrong unless what begin_reduce_scatter gave back can be called.
    """
    members, flats = sums.draw(attempt)
    context = called_alone(attempt) if sums.in_subgroup else str(sums)
    found = attempt.run(probe_sums, sums, per_rank=[(each,) for each in flats], context=context)
    for rank in members:
        if found[rank]["kind"] is not None:
            raise Wrong({rank: f"it gives back a {found[rank]['kind']}; expected a function"})
    return {rank: found[rank] for rank in members}, flats


def each_rank_gets_its_part_of_the_sum(attempt: Attempt) -> None:
    """Added in any order, N numbers of b bits are within N roundings of 2⁻ᵇ of the largest sum."""
    some = attempt.random.randint
    tried = [Sums((some(2, 5), some(2, 9), 1)), Sums((some(4, 9),), torch.bfloat16)]
    tried += [Sums((3, some(1, 6)), in_subgroup=True)] if attempt.world_size in SUBGROUPS else []
    for sums in tried:
        found, flats = _try(attempt, sums)
        tolerance = 1e-10 if sums.dtype == torch.float64 else 2**-8 * len(found)
        for number in range(len(sums.parts)):
            brought = [flats[rank][number].double() for rank in found]
            total = sum(brought).view(len(found), -1)
            for place, (rank, result) in enumerate(found.items()):
                part = result["results"][number]
                said = f"{sums}: part {place} of the sum" + f" of tensor {number + 1}" * (len(sums.parts) > 1)
                if part.dtype != sums.dtype:
                    raise Wrong({rank: f"{said} is of {part.dtype}; expected {sums.dtype}"})
                if not close(part, total[place], tolerance):
                    difference = first_difference(part, total[place], tolerance)
                    raise Wrong({rank: f"{said}: {difference}"}, _cause(part, brought, place, tolerance))


def _cause(part: torch.Tensor, brought: list[torch.Tensor], place: int, tolerance: float) -> str:
    size, total = len(brought), sum(brought).view(len(brought), -1)
    if part.shape != total[place].shape:
        return "Look at: which part of the sum belongs to this rank?"
    if size > 1 and close(part, total[place] / size, tolerance):
        return f"It is {size} times too small. The sum is asked for here, not the mean."
    if any(close(part, each, tolerance) for each in total):
        return "It is another rank's part of the sum."
    if any(close(part, each.view(size, -1)[place], tolerance) for each in brought):
        return "It is what one rank alone brought. Look at: what is added up, and is it there when it is added?"
    without = [total[place] - each.view(size, -1)[place] for each in brought]
    if any(close(part, each, tolerance) for each in without):
        return "One rank's part is missing in it. Look at: how many parts are there to add up?"
    return "Look at: which part goes to whom, and in which order are they added up?"


def one_part_of_flat_is_sent_to_each(attempt: Attempt) -> None:
    sums = Sums((attempt.random.randint(20, 40),))
    found, _ = _try(attempt, sums)
    calls = {rank: result["calls"][0] for rank, result in found.items()}
    judge_rounds(calls, [Flat(sums.parts[0] * attempt.world_size, 8)], 1, str(sums))


def probe_late(begin, token: int, late: int, rank: int, flat: torch.Tensor) -> dict:
    """→ on the late rank: whose call had not come back when patience ended; the result"""
    meeting, missing = Meeting(f"sum{token}"), []
    with launches_unasked():
        if rank == late:
            missing = meeting.missing()
        finish = begin(flat.to(device_here()))
        if rank != late:
            meeting.come()
        return {"missing": missing, "result": finish().detach().cpu().clone()}


def the_call_comes_back_at_once(attempt: Attempt) -> None:
    members, flats = Sums((4,)).draw(attempt)
    late, token = attempt.random.choice(members), attempt.draw_seed()
    per_rank = [(rank, flats[rank][0]) for rank in members]
    found = attempt.run(probe_late, token, late, per_rank=per_rank, context=f"rank {late} comes late")
    if missing := found[late]["missing"]:
        said = f"while rank {late} had not begun, the call did not come back here in {PATIENCE_S:g} s"
        hint = "Look at: which of its lines wait for the others, and where is the function that may?"
        raise Wrong(dict.fromkeys(missing, said), hint)
    total = sum(each[0] for each in flats).view(len(members), -1)
    for rank, result in enumerate(found):
        if not close(result["result"], total[rank]):
            said = f"rank {late} late by a little: {first_difference(result['result'], total[rank])}"
            raise Wrong({rank: said}, "Look at: what is waited for, before parts are added up?")


def probe_memory(begin, numbers: int) -> int:
    """→ bytes that are held at the most, flat's own among them"""
    flat = torch.ones(numbers, device=device_here())
    with memory.peak(extra={"parameters": [flat]}) as peak:
        begin(flat)()
    return peak.at_peak.held.total_bytes


def there_is_little_room_for_what_arrives(attempt: Attempt) -> None:
    """Flat, what arrives, the result, and one part for adding up. An all-to-all has room for its own part, too."""
    size = attempt.world_size
    flat_bytes = 4 * NUMBERS * size
    found = attempt.run(probe_memory, NUMBERS * size)
    for rank, held_bytes in enumerate(found):
        if held_bytes > SLACK * flat_bytes * (2 + 2 / size):
            said = f"flat has {flat_bytes:,} bytes, and with it {held_bytes:,} are held"
            expected = f"expected room for {flat_bytes * (size - 1) // size:,} that arrive, and for the result"
            hint = "Look at: which parts of the others' does this rank need? And how many copies are made in adding up?"
            raise Wrong({rank: f"{said}; {expected}"}, hint)
