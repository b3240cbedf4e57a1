"""Find out what a wrong result consists of: which chunk it is, and how often it contains each rank's contribution.

A right result consists of slots, each of which is one chunk added up over some ranks. A wrong result usually does, too,
but with other chunks or other ranks. Trying all of them tells a student what the result is, in the exercise's words.
"""

import itertools
from dataclasses import dataclass

import torch

from shared.checks.engine.compare import total_of
from shared.ranks.diagnosis import name_ranks

SPOILT = -1  # a check writes this into the caller's tensors as soon as a call has returned
UNTOUCHED = -2  # a check writes this into memory that the next call may fill
_COMPARED = 64  # the number of elements of a slot to compare; more would not add certainty
_LEAST = 3  # with fewer elements, too many mixtures match


@dataclass(frozen=True)
class Slot:
    """A part of a result: one chunk, added up over some ranks."""

    chunk: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """The ranks' contributions, as chunks of equal size: by_rank[rank][chunk]."""

    by_rank: dict[int, list[torch.Tensor]]
    noun: str = "chunk"  # the exercise's word for a chunk

    def value(self, slot: Slot) -> torch.Tensor:
        """Add up a slot in float64, or integers exactly in int64."""
        parts = [self.by_rank[rank][slot.chunk] for rank in slot.ranks]
        return total_of(part.double() if part.is_floating_point() else part.long() for part in parts)

    def tolerance(self, slot: Slot) -> torch.Tensor:
        """Return the largest error of each element of the slot's sum, for any order of additions.

        Each of the n − 1 additions rounds by at most u times the partial sum, so all of them by (n−1)·u·Σ|x|, where u
        is half of the dtype's eps. The tolerance is twice that, because our own sum is rounded, too.
        """
        parts = [self.by_rank[rank][slot.chunk] for rank in slot.ranks]
        if len(parts) == 1:
            return torch.zeros(len(parts[0]), dtype=torch.float64)
        unit = torch.finfo(parts[0].dtype).eps / 2 if parts[0].dtype.is_floating_point else 0.0
        return 2 * (len(parts) - 1) * unit * total_of(part.double().abs() for part in parts)

    @property
    def chunks(self) -> int:
        return len(next(iter(self.by_rank.values())))


def cut(tensor: torch.Tensor, chunks: int) -> list[torch.Tensor]:
    """Split a flattened tensor into chunks of ceil(numel / chunks) elements, padded with zeros."""
    size = -(-tensor.numel() // chunks)
    flat = torch.nn.functional.pad(tensor.flatten(), (0, chunks * size - tensor.numel()))
    return [flat[index * size : (index + 1) * size] for index in range(chunks)]


def explain(found: torch.Tensor, slot: Slot, parts: Parts, rank: int) -> tuple[str, str]:
    """Explain the wrong content of a slot. Returns what it is, and a hint."""
    expected, found = parts.value(slot)[:_COMPARED].double(), found.double()[:_COMPARED]
    spoilt = found == SPOILT
    if bool(spoilt.any()) and torch.allclose(found[~spoilt], expected[~spoilt], rtol=1e-2, atol=1e-3):
        return (
            "The check wrote −1 into another rank's tensor right after its call had returned.",
            "Hint: when may a tensor that is being sent be changed? Do you call wait() on the handle of every isend?",
        )
    if bool((found == UNTOUCHED).all()):
        return (
            "Nothing was written to it: the check put the −2 there.",
            "Hint: which memory does each receive write to, and is it complete when the call returns? "
            "Does an assignment like `name = …` write to memory?",
        )
    if not bool(found.any()):
        return "It is all zeros.", "Hint: do you fill the tensor before you return it?"
    if len(found) < _LEAST:
        return "", ""
    if len(slot.ranks) > 1 and torch.allclose(found * len(slot.ranks), expected, rtol=1e-2, atol=1e-3):
        return f"It is {len(slot.ranks)} times too small: it is the mean.", "Hint: should anything be divided here?"
    mixtures = [taken for taken in _mixtures(parts) if _gives(taken, found, parts)][:2]
    if len(mixtures) == 1:
        return _describe(mixtures[0], slot, parts, rank)
    if torch.allclose(found, expected, rtol=1e-2, atol=1e-3):
        return "It is close, but not precise enough.", "Hint: in which dtype are the values sent and added up?"
    return "", "Hint: which chunk is sent in the first step, how is it padded, and is it complete when you use it?"


Taken = tuple[tuple[int, int], ...]  # (rank, chunk) pairs, each as many times as it is in a sum


def _mixtures(parts: Parts):
    """Yield what may have been added up: one chunk, with each rank's part 0 to 2 times, or one chunk of each rank."""
    ranks = list(parts.by_rank)
    for chunk in range(parts.chunks):
        for counts in itertools.product(range(3), repeat=len(ranks)):
            if any(counts):
                yield tuple((r, chunk) for r, count in zip(ranks, counts, strict=True) for _ in range(count))
    for chunks in itertools.product(range(parts.chunks), repeat=len(ranks)):
        if len(set(chunks)) > 1:
            yield tuple(zip(ranks, chunks, strict=True))


def _gives(taken: Taken, found: torch.Tensor, parts: Parts) -> bool:
    contributions = [parts.by_rank[rank][chunk][:_COMPARED] for rank, chunk in taken]
    if any(len(part) != len(found) for part in contributions):
        return False
    unit = torch.finfo(contributions[0].dtype).eps if contributions[0].dtype.is_floating_point else 0.0
    within = len(contributions) * unit * total_of(part.double().abs() for part in contributions)
    return bool(((sum(part.double() for part in contributions) - found).abs() <= within).all())


def _describe(taken: Taken, slot: Slot, parts: Parts, rank: int) -> tuple[str, str]:
    """Describe what was added up. Returns what it is, and a hint."""
    present, chunks = sorted({r for r, _ in taken}), {chunk for _, chunk in taken}
    noun = f"{parts.noun} {taken[0][1]}" if parts.chunks > 1 else parts.noun
    if len(chunks) > 1:
        each = ", ".join(f"{parts.noun} {chunk} of rank {r}" for r, chunk in taken)
        return f"It is the sum of {each}.", "Hint: which chunk does the received sum belong to?"
    if len(present) == 1:
        whose = "this rank's own" if present == [rank] else f"rank {present[0]}'s"
        if len(taken) > 1:
            return f"It is twice {whose} {noun}.", "Hint: how many times is a rank's contribution added?"
        if len(slot.ranks) > 1:
            hint = "Hint: is the received chunk added? And which chunk is complete after the last step?"
            return f"It is only {whose} {noun}, without the other ranks'.", hint
        return f"It is {whose} {noun}.", "Hint: what does each rank send, to which rank, and where is it stored?"
    message = f"It is {noun}, added up over {name_ranks(present)}"
    twice = [r for r in present if taken.count((r, taken[0][1])) > 1]
    missing = [r for r in slot.ranks if r not in present]
    if twice:
        return f"{message}, but {_parts(twice)} in it twice.", "Hint: how many times is a rank's contribution added?"
    if missing:
        return f"{message}, but {_parts(missing)} missing.", "Hint: after how many steps has a sum visited every rank?"
    if chunks != {slot.chunk}:
        return f"{message}, which belongs to another rank.", "Hint: which chunk does a rank receive in its last step?"
    return f"{message}.", "Hint: should anything be added here?"


def _parts(ranks: list[int]) -> str:
    return f"the contribution{'s' if len(ranks) > 1 else ''} of {name_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'}"
