"""What is in a result: which chunk, and how often each rank's part of it.

A right result is made of slots: one chunk each, added up over some ranks. A wrong one usually is too, only of
other chunks or other ranks. Trying them all tells a student what came, in the words of the exercise.
"""

import itertools
from dataclasses import dataclass

import torch

from shared.ranks.diagnosis import name_ranks

SPOILT = -1  # what a check writes into a caller's tensors as soon as a call has returned
UNTOUCHED = -2  # what it writes into a tensor that is to be filled
_COMPARED = 64  # elements of a slot: more would not make it surer
_LEAST = 3  # fewer elements may be anything


@dataclass(frozen=True)
class Slot:
    """One stretch of a result: a chunk, added up over ranks."""

    chunk: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """What the ranks brought, as chunks of one size: by_rank[rank][chunk]. noun: what a student calls one."""

    by_rank: dict[int, list[torch.Tensor]]
    noun: str = "chunk"

    def value(self, slot: Slot) -> torch.Tensor:
        """Add up, in float64; whole numbers exactly, in int64."""
        parts = [self.by_rank[rank][slot.chunk] for rank in slot.ranks]
        return sum(part.double() if part.is_floating_point() else part.long() for part in parts)

    def tolerance(self, slot: Slot) -> torch.Tensor:
        """How far the slot's sum may be off, element by element, in whatever order it was taken.

        Each of its n − 1 additions rounds by at most u of what has come together so far, so all of them by
        (n−1)·u·Σ|x|, where u is half of the dtype's eps. Twice that, because ours was rounded too.
        """
        parts = [self.by_rank[rank][slot.chunk] for rank in slot.ranks]
        if len(parts) == 1:
            return torch.zeros(len(parts[0]), dtype=torch.float64)
        unit = torch.finfo(parts[0].dtype).eps / 2 if parts[0].dtype.is_floating_point else 0.0
        return 2 * (len(parts) - 1) * unit * sum(part.double().abs() for part in parts)

    @property
    def chunks(self) -> int:
        return len(next(iter(self.by_rank.values())))


def cut(tensor: torch.Tensor, chunks: int) -> list[torch.Tensor]:
    """Cut a flattened tensor into chunks of ceil(numel / chunks) elements, filled up with zeros."""
    size = -(-tensor.numel() // chunks)
    flat = torch.nn.functional.pad(tensor.flatten(), (0, chunks * size - tensor.numel()))
    return [flat[index * size : (index + 1) * size] for index in range(chunks)]


def explain(found: torch.Tensor, slot: Slot, parts: Parts, rank: int) -> tuple[str, str]:
    """Say what stands in a slot instead of what should. → (what it is, a question)"""
    expected, found = parts.value(slot)[:_COMPARED].double(), found.double()[:_COMPARED]
    spoilt = found == SPOILT
    if bool(spoilt.any()) and torch.allclose(found[~spoilt], expected[~spoilt], rtol=1e-2, atol=1e-3):
        return (
            "−1 is what another rank wrote into its tensor when its call had returned.",
            "Hint: when may a tensor that is being sent be changed? Does every isend meet its wait()?",
        )
    if bool((found == UNTOUCHED).all()):
        return (
            "It is what was there before.",
            "Hint: has the message come when the call returns? Does every irecv meet its wait()?",
        )
    if not bool(found.any()):
        return "It is all zeros.", "Hint: was it filled before it was given back?"
    if len(found) < _LEAST:
        return "", ""
    if len(slot.ranks) > 1 and torch.allclose(found * len(slot.ranks), expected, rtol=1e-2, atol=1e-3):
        return f"It is {len(slot.ranks)} times too small: a mean.", "Hint: is anything to be divided here?"
    mixtures = [taken for taken in _mixtures(parts) if _gives(taken, found, parts)][:2]
    if len(mixtures) == 1:
        return _told(mixtures[0], slot, parts, rank)
    if torch.allclose(found, expected, rtol=1e-2, atol=1e-3):
        return "It is close, but could be closer.", "Hint: in which dtype is it added up, and sent?"
    return "", "Hint: which chunk is sent in the first step, what fills it up, and is it complete when it is used?"


Taken = tuple[tuple[int, int], ...]  # (rank, chunk), each as often as it is in a sum


def _mixtures(parts: Parts):
    """Yield what may have been added up: one chunk, each rank's part 0 to 2 times; or a chunk of each rank."""
    ranks = list(parts.by_rank)
    for chunk in range(parts.chunks):
        for counts in itertools.product(range(3), repeat=len(ranks)):
            if any(counts):
                yield tuple((r, chunk) for r, count in zip(ranks, counts, strict=True) for _ in range(count))
    for chunks in itertools.product(range(parts.chunks), repeat=len(ranks)):
        if len(set(chunks)) > 1:
            yield tuple(zip(ranks, chunks, strict=True))


def _gives(taken: Taken, found: torch.Tensor, parts: Parts) -> bool:
    brought = [parts.by_rank[rank][chunk][:_COMPARED] for rank, chunk in taken]
    if any(len(part) != len(found) for part in brought):
        return False
    unit = torch.finfo(brought[0].dtype).eps if brought[0].dtype.is_floating_point else 0.0
    within = len(brought) * unit * sum(part.double().abs() for part in brought)
    return bool(((sum(part.double() for part in brought) - found).abs() <= within).all())


def _told(taken: Taken, slot: Slot, parts: Parts, rank: int) -> tuple[str, str]:
    """Put what was added up into words."""
    present, chunks = sorted({r for r, _ in taken}), {chunk for _, chunk in taken}
    noun = f"{parts.noun} {taken[0][1]}" if parts.chunks > 1 else parts.noun
    if len(chunks) > 1:
        each = ", ".join(f"{parts.noun} {chunk} of rank {r}" for r, chunk in taken)
        return f"It adds up {each}.", "Hint: which chunk does the sum that arrives belong to?"
    if len(present) == 1:
        whose = "this rank's own" if present == [rank] else f"rank {present[0]}'s"
        if len(taken) > 1:
            return f"It is twice {whose} {noun}.", "Hint: how often is what a rank brought added?"
        if len(slot.ranks) > 1:
            hint = "Hint: what is done with what arrives? And which chunk is complete after the last step?"
            return f"It is {whose} {noun}, and nobody else's.", hint
        return f"It is {whose} {noun}.", "Hint: who sends what to whom, and where does it belong?"
    message = f"It is {noun}, added up over {name_ranks(present)}"
    twice = [r for r in present if taken.count((r, taken[0][1])) > 1]
    missing = [r for r in slot.ranks if r not in present]
    if twice:
        return f"{message}; {_parts(twice)} in it twice.", "Hint: how often is what a rank brought added?"
    if missing:
        return f"{message}; {_parts(missing)} missing.", "Hint: after how many steps has a sum passed every rank?"
    if chunks != {slot.chunk}:
        return f"{message}: right, but another rank's.", "Hint: which chunk does a rank receive in its last step?"
    return f"{message}.", "Hint: is anything to be added here?"


def _parts(ranks: list[int]) -> str:
    return f"{name_ranks(ranks)}'s part{'s are' if len(ranks) > 1 else ' is'}"
