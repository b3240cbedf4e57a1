"""Check launch_reduce_scatter: it returns at once, and its handle's wait() returns this rank's shard of the sum."""

from dataclasses import dataclass, field

import torch

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.sharded.wire import Flat, judge_rounds
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.wire import instrumentation

SHARD_NUMEL = 30_000  # for the check of memory
SLACK = 1.01


@dataclass(frozen=True)
class Sums:
    """Flat tensors to reduce-scatter.

    Attributes:
        shard_numels: The number of elements in a shard of each flat tensor.
        dtype: Their dtype.
        in_subgroup: Whether only a subgroup takes part.
    """

    shard_numels: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    in_subgroup: bool = False

    def draw(self, attempt: Attempt) -> tuple[list[int], list[list[torch.Tensor]]]:
        """Draw every rank's flat tensors. Returns the members of the group, and the tensors per rank of the world."""
        members = members_of(attempt, self.in_subgroup)
        draw = torch.Generator().manual_seed(attempt.draw_seed())
        numels = [numel * len(members) for numel in self.shard_numels]
        return members, [
            [torch.randn(numel, generator=draw, dtype=torch.float64).to(self.dtype) for numel in numels]
            for _ in range(attempt.world_size)
        ]

    def __str__(self) -> str:
        message = ", then ".join(f"N · {numel}" for numel in self.shard_numels)
        dtype = "" if self.dtype == torch.float64 else f" in {str(self.dtype).removeprefix('torch.')}"
        return f"a flat tensor with {message} elements{dtype}"


@dataclass
class Scattered:
    """What the reduce-scatters of several flat tensors did. It is empty on a rank outside the group."""

    calls: list[list[instrumentation.Call]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    in_flat: list[bool] = field(default_factory=list)  # whether the result has the memory of the flat tensor
    returned: str = ""  # says what was returned if it is not a handle or not a tensor


def probe_sums(launch, sums: Sums, flats: list[torch.Tensor]) -> Scattered:
    """Launch a reduce-scatter of each flat tensor, then wait for each."""
    group, member = join_subgroup(sums.in_subgroup)
    found = Scattered()
    if not member:
        return found
    handles, inputs = [], [flat.to(device_here()) for flat in flats]
    for flat in inputs:
        with instrumentation.listening() as calls:
            handles.append(launch(flat, *([group] if group is not None else [])))
        found.calls.append(calls)
    for index, handle in enumerate(handles):
        if not hasattr(handle, "wait"):
            found.returned = f"launch_reduce_scatter() returned a {type(handle).__name__} without wait()"
            return found
        with instrumentation.listening() as calls:
            result = handle.wait()
        if not isinstance(result, torch.Tensor):
            kind = "None" if result is None else f"a {type(result).__name__}"
            found.returned = f"the handle's wait() returned {kind}"
            return found
        found.results.append(result.detach().cpu().clone())
        found.in_flat.append(result.untyped_storage().data_ptr() == inputs[index].untyped_storage().data_ptr())
        found.calls[index] += calls
    return found


def _try(attempt: Attempt, sums: Sums) -> tuple[dict[int, Scattered], list[list[torch.Tensor]]]:
    """Launch on fresh data. Returns the results by global rank, and each rank's flat tensors.

    Raises:
        Wrong: If a call does not return a handle whose wait() returns a tensor.
    """
    members, flats = sums.draw(attempt)
    context = called_alone(attempt) if sums.in_subgroup else str(sums)
    found = attempt.run(probe_sums, sums, per_rank=[(each,) for each in flats], context=context)
    for rank in members:
        if message := found[rank].returned:
            hint = "The caller gets the sum from the handle's wait(). Hint: what does each of your methods return?"
            raise Wrong({rank: f"{message}; expected a handle whose wait() returns this rank's shard"}, hint)
    return {rank: found[rank] for rank in members}, flats


def each_rank_gets_its_shard_of_the_sum(attempt: Attempt) -> None:
    """In any order, the sum of N values with b bits of precision is off by at most N · 2⁻ᵇ times the largest sum."""
    draw = attempt.random.randint
    tried = [Sums((draw(2, 5), draw(2, 9), 1)), Sums((draw(4, 9),), torch.bfloat16)]
    tried += [Sums((3, draw(1, 6)), in_subgroup=True)] if attempt.world_size in SUBGROUPS else []
    for sums in tried:
        found, flats = _try(attempt, sums)
        tolerance = 1e-10 if sums.dtype == torch.float64 else 2**-8 * len(found)
        for number in range(len(sums.shard_numels)):
            contributed = [flats[rank][number].double() for rank in found]
            total = total_of(contributed).view(len(found), -1)
            for index, (rank, result) in enumerate(found.items()):
                shard = result.results[number]
                which = f" of flat tensor {number + 1}" if len(sums.shard_numels) > 1 else ""
                message = f"{sums}: shard {index} of the sum{which}"
                if shard.dtype != sums.dtype:
                    raise Wrong({rank: f"{message} has dtype {shard.dtype}; expected {sums.dtype}"})
                if not nearly_equal(shard, total[index], tolerance):
                    difference = first_difference(shard, total[index], tolerance)
                    raise Wrong({rank: f"{message}: {difference}"}, _cause(shard, contributed, index, tolerance))


def the_sum_is_in_the_flat_tensor(attempt: Attempt) -> None:
    sums = Sums((attempt.random.randint(2, 9),))
    found, _ = _try(attempt, sums)
    message = f"{sums}: wait() returned a tensor with memory of its own; expected a view of the flat tensor"
    if wrong := {rank: message for rank, result in found.items() if not all(result.in_flat)}:
        raise Wrong(wrong, "Callers use the sum in the flat tensor. Hint: which tensor does your addition write to?")


def _cause(shard: torch.Tensor, contributed: list[torch.Tensor], index: int, tolerance: float) -> str:
    size, total = len(contributed), total_of(contributed).view(len(contributed), -1)
    if shard.shape != total[index].shape:
        return "Hint: which shard of the sum belongs to this rank?"
    if size > 1 and nearly_equal(shard, total[index] / size, tolerance):
        return f"It is {size} times too small: it should be the sum, not the mean."
    if any(nearly_equal(shard, each, tolerance) for each in total):
        return "It is another rank's shard of the sum. Hint: which shard is sent to which rank?"
    if any(nearly_equal(shard, each.view(size, -1)[index], tolerance) for each in contributed):
        return (
            "It is the contribution of a single rank. Hint: which tensors do you receive into, and then add up? "
            "And is the data already in them when you add them?"
        )
    if repeated := _repeated(shard, contributed, index, tolerance):
        return (
            f"It contains rank {repeated[0]}'s contribution {repeated[1]} times, and others are missing. "
            "Hint: does every receive write into a tensor of its own?"
        )
    without = [total[index] - each.view(size, -1)[index] for each in contributed]
    if any(nearly_equal(shard, each, tolerance) for each in without):
        return "One rank's contribution is missing. Hint: how many shards must be added up, and from which ranks?"
    return (
        "Hint: which shard is sent to which rank? Does every receive write into a tensor of its own? "
        "When do you add the received shards, and to what?"
    )


def _repeated(shard: torch.Tensor, contributed: list[torch.Tensor], index: int, tolerance: float) -> tuple[int, ...]:
    """Return which rank's contribution was added in place of all others, and how often, or an empty tuple.

    This happens if all shards are received into the same memory.
    """
    size = len(contributed)
    mine = [each.view(size, -1)[index] for each in contributed]
    ranks = (other for other in range(size) if other != index)
    return next(
        (
            (other, size - 1)
            for other in ranks
            if nearly_equal(shard, mine[index] + (size - 1) * mine[other], tolerance)
        ),
        (),
    )


def each_rank_sends_every_other_rank_one_shard(attempt: Attempt) -> None:
    sums = Sums((attempt.random.randint(20, 40),))
    found, _ = _try(attempt, sums)
    calls = {rank: result.calls[0] for rank, result in found.items()}
    judge_rounds(calls, [Flat(sums.shard_numels[0] * attempt.world_size, 8)], 1, str(sums))


@dataclass
class LateLaunch:
    """A reduce-scatter for which one rank launches late."""

    missing: list[int]  # on the late rank, the ranks whose call had not returned before it launched
    result: torch.Tensor
    in_call: int  # how many messages were launched in the call
    in_wait: int


@rehearsed
def probe_late(launch, token: int, late: int, rank: int, flat: torch.Tensor) -> LateLaunch:
    """Let one rank launch late."""
    meeting, missing = Rendezvous(f"sum{token}"), []
    with launches_unasked():
        if rank == late:
            missing = meeting.missing()
        with instrumentation.listening() as in_call:
            handle = launch(flat.to(device_here()))
        if rank != late:
            meeting.arrive()
        with instrumentation.listening() as in_wait:
            result = handle.wait().detach().cpu().clone()
        return LateLaunch(missing, result, len(in_call), len(in_wait))


def the_call_returns_at_once(attempt: Attempt) -> None:
    members, flats = Sums((4,)).draw(attempt)
    late, token = attempt.random.choice(members), attempt.draw_seed()
    per_rank = [(rank, flats[rank][0]) for rank in members]
    found = attempt.run(probe_late, token, late, per_rank=per_rank, context=f"rank {late} launches late")
    if missing := found[late].missing:
        message = f"the call did not return within {PATIENCE_S:g} s while rank {late} had not launched yet"
        hint = "So the caller cannot compute anything in the meantime. Hint: which line waits for other ranks?"
        raise Wrong(dict.fromkeys(missing, message), hint)
    if wrong := {rank: _launched(result) for rank, result in enumerate(found) if result.in_wait}:
        raise Wrong(wrong, "Hint: when should the messages start, so that the caller can compute meanwhile?")
    total = total_of(each[0] for each in flats).view(len(members), -1)
    for rank, result in enumerate(found):
        if not nearly_equal(result.result, total[rank]):
            message = f"rank {late} launches after the others: {first_difference(result.result, total[rank])}"
            raise Wrong({rank: message}, "Hint: what does wait() wait for before it adds up shards?")


def _launched(found: LateLaunch) -> str:
    if not found.in_call:
        return "the call launched no messages; wait() launched them"
    total = found.in_call + found.in_wait
    return f"the call launched only {found.in_call} of {total} messages; wait() launched the others"


def probe_memory(launch, numel: int) -> int:
    """Return the peak of the bytes that are held, including those of the flat tensor."""
    flat = torch.ones(numel, device=device_here())
    with memory.peak(extra={"parameters": [flat]}) as peak:
        launch(flat).wait()
    return peak.at_peak.held.total_bytes


def probe_unfinished(launch, numel: int) -> list[str]:
    """Return the messages of one reduce-scatter that are not complete when wait() has returned."""
    launched = []
    flat = torch.ones(numel, device=device_here())
    with instrumentation.listening(launched=lambda call, work, _: launched.append((str(call), work))):
        launch(flat).wait()
    if device_here().type != "cpu":  # on a GPU, wait() only makes the current stream wait
        return []
    return [call for call, work in launched if work is not None and not work.is_completed()]


def every_message_is_waited_for(attempt: Attempt) -> None:
    for rank, unfinished in enumerate(attempt.run(probe_unfinished, 5 * attempt.world_size)):
        if unfinished:
            message = f"wait() returned before {unfinished[0]} was complete; expected it to wait for all messages"
            hint = "The caller may overwrite the flat tensor now. Hint: which messages still read from it?"
            raise Wrong({rank: message}, hint)


def little_memory_is_needed(attempt: Attempt) -> None:
    """Allow the flat tensor, the received shards, the result, and one shard for adding up.

    An all-to-all also receives the rank's own shard.
    """
    size = attempt.world_size
    flat_bytes = 4 * SHARD_NUMEL * size
    found = attempt.run(probe_memory, SHARD_NUMEL * size)
    for rank, held_bytes in enumerate(found):
        if held_bytes > SLACK * flat_bytes * (2 + 2 / size):
            message = f"up to {held_bytes:,} bytes are held, of which {flat_bytes:,} belong to the flat tensor"
            expected = f"expected {flat_bytes * (size - 1) // size:,} more for the received shards, plus the result"
            hint = "Hint: which shards does this rank need from the others? And how many copies do you make of them?"
            raise Wrong({rank: f"{message}; {expected}"}, hint)
