"""Judging where checkpoints are put: against every choice there is."""

import re
from functools import lru_cache
from itertools import combinations

from shared.checks.engine.framework import Attempt, Wrong

MOST_BLOCKS = 12
TRIES = 40
# saved, input and target bytes: who takes the block that helps most, and then the next, gets nowhere, or takes too many
NEEDS_FORESIGHT = [
    ([29, 11, 1, 11, 6], [19, 4, 1, 2, 2], 47),
    ([5, 30, 7, 15, 11], [4, 23, 2, 5, 2], 57),
]
MUST_HAVES = (0, 3, 7)  # blocks below them, of which each must be chosen: more than can be found by trying a few
MOST_SIZES = 4  # in an error's words: who lists every peak does not say which is the lowest


_LOWEST = "Look at: which one of them is the lowest peak?"


def peak_bytes(saved: list[int], given: list[int], chosen: tuple[int, ...]) -> int:
    """The exercise's own words."""
    blocks = range(len(saved))
    kept = [given[i] if i in chosen else saved[i] for i in blocks]
    return max(sum(kept[: k + 1]) + (saved[k] if k in chosen else 0) for k in blocks)


@lru_cache(maxsize=100)
def every_peak(saved: tuple[int, ...], given: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """The peak of every choice, those of few blocks first."""
    blocks = range(len(saved))
    choices = [chosen for count in range(len(saved) + 1) for chosen in combinations(blocks, count)]
    return {chosen: peak_bytes(saved, given, chosen) for chosen in choices}


def draw_blocks(attempt: Attempt, blocks: int) -> tuple[list[int], list[int]]:
    """Draw what blocks keep. Now and then all are equal, or an input is larger than what it would save."""
    draw = attempt.random.randint
    if draw(0, 4) == 0:
        return [draw(50, 2000)] * blocks, [draw(1, 40)] * blocks
    saved = [draw(20, 2000) for _ in range(blocks)]
    return saved, [draw(1, max(1, each // draw(1, 12)) + 30) for each in saved]


def probe_peaks(activation_peak_bytes, tried: list[tuple]) -> list:
    return [activation_peak_bytes(list(saved), list(given), chosen) for saved, given, chosen in tried]


def probe_placing(place_checkpoints, tried: list[tuple]) -> list[tuple]:
    """→ per try: the choice, or the words of the ValueError"""
    found = []
    for saved, given, target in tried:
        mine = list(saved), list(given)
        try:
            found.append(("chosen", place_checkpoints(*mine, target)))
        except ValueError as error:
            found.append(("refused", str(error)))
        if mine != (saved, given):
            raise AssertionError("saved_bytes and input_bytes were changed: they belong to the caller")
    return found


def _said(saved: list[int], given: list[int]) -> str:
    return f"saved_bytes {saved}, input_bytes {given}"


def peaks_are_predicted(attempt: Attempt) -> None:
    tried = []
    for _ in range(TRIES):
        saved, given = draw_blocks(attempt, attempt.random.randint(1, 6))
        chosen = attempt.random.sample(range(len(saved)), attempt.random.randint(0, len(saved)))
        tried.append((saved, given, tuple(sorted(chosen))))
    tried.sort(key=lambda each: (len(each[0]), len(each[2])))  # the first that is wrong is the easiest to follow
    for rank, peaks in enumerate(attempt.run(probe_peaks, tried)):
        for (saved, given, chosen), found in zip(tried, peaks, strict=True):
            if found != (want := peak_bytes(saved, given, chosen)):
                said = f"{_said(saved, given)}, chosen {chosen}: {found} bytes; expected {want}"
                raise Wrong({rank: said}, _cause(saved, given, chosen, found))


def _cause(saved: list[int], given: list[int], chosen: tuple[int, ...], found) -> str:
    kept = [given[i] if i in chosen else saved[i] for i in range(len(saved))]
    if found == sum(kept):
        return "It is what is kept when forward ends. Look at: what comes back in backward, and when?"
    if found == sum(kept) + max((saved[i] for i in chosen), default=0):
        return "Look at: when the activations of a low block come back, what of the blocks above it is still there?"
    if found == sum(kept) + sum(saved[i] for i in chosen):
        return "Look at: how many blocks' activations are back at one moment?"
    return "Look at: which moment of backward holds the most?"


def _draw_targets(attempt: Attempt, reachable: bool) -> list[tuple]:
    """Draw blocks, and as a target exactly the peak of some choice: or one byte less than any has."""
    tried = []
    sizes = [attempt.random.randint(1, 7) for _ in range(TRIES)] if reachable else [1, 2, 3, 4, 5, 6, 7]
    for blocks in [*sorted(sizes), MOST_BLOCKS]:
        saved, given = draw_blocks(attempt, blocks)
        peaks = sorted(set(every_peak(tuple(saved), tuple(given)).values()))
        low = peaks[: max(1, len(peaks) // 3)]  # where it is hard to be good enough
        target = attempt.random.choice(low if attempt.random.random() < 0.7 else peaks) if reachable else peaks[0] - 1
        tried.append((saved, given, target))
    if reachable:
        scale = attempt.random.randint(20, 200)
        for saved, given, target in NEEDS_FORESIGHT:
            for below in MUST_HAVES:
                blocks = [target - 7] * below + saved, [1] * below + given
                tried.append((*([scale * each for each in some] for some in blocks), scale * (target + below)))
    return tried


def as_few_as_possible(attempt: Attempt) -> None:
    tried = _draw_targets(attempt, True)
    for rank, results in enumerate(attempt.run(probe_placing, tried)):
        for (saved, given, target), (kind, found) in zip(tried, results, strict=True):
            peaks = every_peak(tuple(saved), tuple(given))
            fewest = next(chosen for chosen, peak in peaks.items() if peak <= target)
            said = f"{_said(saved, given)}, target_bytes {target}"
            if kind == "refused":
                evidence = f"{said}: ValueError({found[:80]!r}); a choice of {len(fewest)} blocks does it"
                hint = "Look at: is a peak of exactly target_bytes good enough, and which choices were never tried?"
                raise Wrong({rank: evidence}, hint)
            chosen = _as_choice(rank, found, len(saved), said)
            if peaks[chosen] > target:
                evidence = f"{said}: {chosen} has a peak of {peaks[chosen]}"
                raise Wrong({rank: evidence}, "Look at: when is the peak, with these blocks checkpointed?")
            if len(chosen) > len(fewest):
                evidence = f"{said}: {chosen} are {len(chosen)} blocks; {len(fewest)} can do it"
                hint = "What a block saves is not what the peak loses. Look at: which smaller choices were never tried?"
                raise Wrong({rank: evidence}, hint)


def _as_choice(rank: int, found, blocks: int, said: str) -> tuple[int, ...]:
    """Take a tuple, a list or a set of block numbers.

    Raises: Wrong for anything else.
    """
    fits = isinstance(found, tuple | list | set | frozenset) and set(found) <= set(range(blocks))
    if not fits or len(set(found)) < len(found):
        raise Wrong({rank: f"{said}: it gave back {found!r}; expected numbers of blocks, each once"})
    return tuple(sorted(found))


def the_lowest_peak_is_told(attempt: Attempt) -> None:
    tried = _draw_targets(attempt, False)
    for rank, results in enumerate(attempt.run(probe_placing, tried)):
        for (saved, given, target), (kind, found) in zip(tried, results, strict=True):
            lowest = min(every_peak(tuple(saved), tuple(given)).values())
            said = f"{_said(saved, given)}, target_bytes {target}"
            if kind == "chosen":
                raise Wrong({rank: f"{said}: {found}; expected a ValueError, no choice is below {lowest}"})
            numbers = re.findall(r"\d+", re.sub(r"(?<=\d)[,_ '](?=\d{3})", "", found))
            sizes = {number for number in numbers if len(number) > 2}  # others may be numbers of blocks
            if len(sizes) > MOST_SIZES:
                raise Wrong({rank: f"{said}: ValueError({found[:90]!r}) says {len(sizes)} sizes"}, _LOWEST)
            if str(lowest) not in numbers:
                evidence = f"{said}: ValueError({found[:90]!r}); expected the lowest peak, {lowest}, in its words"
                says_one = re.search(r"\d", found.replace(str(target), ""))
                hint = "of which choice is the number that it says?" if says_one else "which number do its words lack?"
                raise Wrong({rank: evidence}, f"Look at: {hint}")
