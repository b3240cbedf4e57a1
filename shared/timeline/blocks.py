"""Names the spans of a training step by the blocks of its model, with names that are short enough for a figure."""

from dataclasses import replace

from shared.timeline import ALL_GATHER, REDUCE_SCATTER, Timeline
from shared.timeline.bundles import bundled

ROOT = "root"


def with_block_numbers(line: Timeline) -> Timeline:
    """Return a copy of a timeline in which "blocks.3" is named "3"."""
    return replace(line, spans=[replace(span, name=span.name.removeprefix("blocks.")) for span in line.spans])


def zero3_step(line: Timeline, blocks: int, ranks: int, prefetched: bool = False) -> Timeline:
    """Return a copy of the timeline of a ZeRO-3 step, with a lane of all-gathers and a lane of reduce-scatters.

    Each collective is one span, named by the number of its block, or "root".

    Args:
        blocks: How many blocks the model has. Each is a unit, and the root stays unsharded for the whole step.
        ranks: How many ranks took part. Each collective consisted of a send to, and a receive from, each other rank.
        prefetched: Whether each block launches the all-gather of the next one, in forward and in backward.

    Raises:
        ValueError: If the timeline does not have the collectives of such a step.
    """
    lanes, names = zip(*_launches(blocks, prefetched), strict=True)
    return bundled(with_block_numbers(line), 2 * (ranks - 1), names, lanes)


def _launches(blocks: int, prefetched: bool) -> list[tuple[str, str]]:
    """Return the lane and the name of each collective of a step, in launch order.

    With prefetching, the all-gathers of forward are launched earlier, but in the same order.
    """
    numbers = [str(number) for number in range(blocks)]
    launched = [(ALL_GATHER, name) for name in (ROOT, *numbers)]
    reached = numbers[::-1]
    for index, number in enumerate(reached):
        gathered = reached[index : index + 1]
        if prefetched:  # the first block of backward launches its own all-gather as well as the next one's
            gathered = reached[index + 1 : index + 2] if index else reached[:2]
        launched += [(ALL_GATHER, name) for name in gathered]
        launched.append((REDUCE_SCATTER, number))
    return [*launched, (REDUCE_SCATTER, ROOT)]
