"""Judge where checkpoints are placed, against every possible choice."""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong

MOST_BLOCKS = 12
TRIES = 40
# Saved, input and target bytes for which a greedy choice of the block that helps most fails or takes too many blocks.
NEEDS_FORESIGHT = [
    ([29, 11, 1, 11, 6], [19, 4, 1, 2, 2], 47),
    ([5, 30, 7, 15, 11], [4, 23, 2, 5, 2], 57),
]
MUST_HAVES = (0, 3, 7)  # numbers of blocks below them that must all be chosen: too many to find by trying a few
MOST_SIZES = 4  # in an error message: a list of every peak does not say which one is the lowest


_LOWEST = "Hint: which of these sizes is the lowest peak?"


def peak_bytes(saved: Sequence[int], given: Sequence[int], chosen: tuple[int, ...]) -> int:
    """Compute the peak as the exercise defines it."""
    blocks = range(len(saved))
    kept = [given[i] if i in chosen else saved[i] for i in blocks]
    return max(sum(kept[: k + 1]) + (saved[k] if k in chosen else 0) for k in blocks)


@lru_cache(maxsize=100)
def every_peak(saved: tuple[int, ...], given: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """Return the peak of every choice, those of few blocks first."""
    blocks = range(len(saved))
    choices = [chosen for count in range(len(saved) + 1) for chosen in combinations(blocks, count)]
    return {chosen: peak_bytes(saved, given, chosen) for chosen in choices}


def draw_blocks(attempt: Attempt, blocks: int) -> tuple[list[int], list[int]]:
    """Draw what each block keeps. Sometimes all are equal, or an input is larger than what checkpointing saves."""
    draw = attempt.random.randint
    if draw(0, 4) == 0:
        return [draw(50, 2000)] * blocks, [draw(1, 40)] * blocks
    saved = [draw(20, 2000) for _ in range(blocks)]
    return saved, [draw(1, max(1, each // draw(1, 12)) + 30) for each in saved]


def probe_peaks(activation_peak_bytes, tried: list[tuple]) -> list:
    found = []
    for saved, given, chosen in tried:
        arguments = list(saved), list(given)
        found.append(activation_peak_bytes(*arguments, chosen))
        _check_arguments("activation_peak_bytes", arguments, (saved, given))
    return found


def _check_arguments(name: str, arguments: tuple[list, list], given: tuple[list, list]) -> None:
    if arguments != given:
        raise AssertionError(f"{name}() changed saved_bytes or input_bytes, which belong to the caller")


def probe_placing(place_checkpoints, tried: list[tuple]) -> list[tuple]:
    """Return, for each try, the choice or the message of the ValueError."""
    found = []
    for saved, given, target in tried:
        arguments = list(saved), list(given)
        try:
            found.append(("chosen", place_checkpoints(*arguments, target)))
        except ValueError as error:
            found.append(("rejected", str(error)))
        _check_arguments("place_checkpoints", arguments, (saved, given))
    return found


def _describe_blocks(saved: list[int], given: list[int]) -> str:
    return f"saved_bytes {saved}, input_bytes {given}"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def peaks_are_predicted(attempt: Attempt) -> None:
    tried = []
    for _ in range(TRIES):
        saved, given = draw_blocks(attempt, attempt.random.randint(1, 6))
        chosen = attempt.random.sample(range(len(saved)), attempt.random.randint(0, len(saved)))
        tried.append((saved, given, tuple(sorted(chosen))))
    tried.sort(key=lambda each: (len(each[0]), len(each[2])))  # The first wrong case is then the easiest one.
    for rank, peaks in enumerate(attempt.run(probe_peaks, tried)):
        for (saved, given, chosen), found in zip(tried, peaks, strict=True):
            if found != (expected := peak_bytes(saved, given, chosen)):
                evidence = (
                    f"{_describe_blocks(saved, given)}, chosen {chosen}: the peak is {found} bytes; expected {expected}"
                )
                raise Wrong({rank: evidence}, _cause(saved, given, chosen, found))


def _cause(saved: list[int], given: list[int], chosen: tuple[int, ...], found) -> str:
    kept = [given[i] if i in chosen else saved[i] for i in range(len(saved))]
    if found == sum(kept):
        return "This is what is kept when forward ends. Hint: what is recomputed in backward, and when?"
    if found == sum(kept) + max((saved[i] for i in chosen), default=0):
        return "Hint: when an early block is recomputed, which activations of later blocks are still kept?"
    if found == sum(kept) + sum(saved[i] for i in chosen):
        return "Hint: how many recomputed blocks exist at the same time?"
    return "Hint: at which moment of backward is the most memory held?"


def _draw_targets(attempt: Attempt, reachable: bool) -> list[tuple]:
    """Draw blocks and a target: exactly the peak of some choice or, if not reachable, one byte less than the lowest."""
    tried = []
    sizes = [attempt.random.randint(1, 7) for _ in range(TRIES)] if reachable else [1, 2, 3, 4, 5, 6, 7]
    for blocks in [*sorted(sizes), MOST_BLOCKS]:
        saved, given = draw_blocks(attempt, blocks)
        peaks = sorted(set(every_peak(tuple(saved), tuple(given)).values()))
        low = peaks[: max(1, len(peaks) // 3)]  # These targets are hard to reach.
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
            context = f"{_describe_blocks(saved, given)}, target_bytes {target}"
            if kind == "rejected":
                evidence = (
                    f"{context}: raised ValueError({found[:80]!r}), but a choice of {_blocks(len(fewest))} is enough"
                )
                hint = "Hint: is a peak of exactly target_bytes low enough, and which choices were never tried?"
                raise Wrong({rank: evidence}, hint)
            chosen = _as_choice(rank, found, len(saved), context)
            if peaks[chosen] > target:
                evidence = f"{context}: the choice {chosen} has a peak of {peaks[chosen]}"
                raise Wrong({rank: evidence}, "Hint: with these blocks checkpointed, when is the peak?")
            if len(chosen) > len(fewest):
                evidence = (
                    f"{context}: the choice {chosen} has {_blocks(len(chosen))}; "
                    f"expected {len(fewest)}, which is enough"
                )
                hint = (
                    "Checkpointing a block may lower the peak by less than the block saves. Hint: which "
                    "smaller choices were never tried?"
                )
                raise Wrong({rank: evidence}, hint)


def _as_choice(rank: int, found, blocks: int, context: str) -> tuple[int, ...]:
    """Convert a tuple, a list or a set of block indices.

    Raises:
        Wrong: For anything else.
    """
    fits = isinstance(found, tuple | list | set | frozenset) and set(found) <= set(range(blocks))
    if not fits or len(set(found)) < len(found):
        raise Wrong({rank: f"{context}: it returned {found!r}; expected block indices, each at most once"})
    return tuple(sorted(found))


def the_lowest_peak_is_named(attempt: Attempt) -> None:
    tried = _draw_targets(attempt, False)
    for rank, results in enumerate(attempt.run(probe_placing, tried)):
        for (saved, given, target), (kind, found) in zip(tried, results, strict=True):
            lowest = min(every_peak(tuple(saved), tuple(given)).values())
            context = f"{_describe_blocks(saved, given)}, target_bytes {target}"
            if kind == "chosen":
                raise Wrong(
                    {
                        rank: (
                            f"{context}: returned {found}; expected a ValueError, since no choice has a peak "
                            f"below {lowest}"
                        )
                    }
                )
            numbers = re.findall(r"\d+", re.sub(r"(?<=\d)[,_ '](?=\d{3})", "", found))
            sizes = {number for number in numbers if len(number) > 2}  # Smaller ones may be block indices.
            if len(sizes) > MOST_SIZES:
                raise Wrong(
                    {
                        rank: (
                            f"{context}: ValueError({found[:200]!r}) names {len(sizes)} sizes; expected only the "
                            "lowest peak"
                        )
                    },
                    _LOWEST,
                )
            if str(lowest) not in numbers:
                evidence = (
                    f"{context}: ValueError({found[:200]!r}); expected its message to name the lowest peak, {lowest}"
                )
                names_one = re.search(r"\d", found.replace(str(target), ""))
                hint = (
                    "which choice has the peak that the message names?"
                    if names_one
                    else "which size does the message lack?"
                )
                raise Wrong({rank: evidence}, f"Hint: {hint}")
