"""Diagrams of collectives: the elements that each rank holds before and after, and the rounds of a tree."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import CELL_IN, WORLD_SIZE, Drawing


@dataclass(frozen=True)
class Element:
    """One element of a rank's tensor: what is written on its cell, and the ranks whose elements it contains."""

    value: int | str
    ranks: tuple[int, ...] = ()


Tensors = list[list[Element]]  # one list of elements per rank
UNDEFINED = Element("?")


def _named(world_size: int) -> Tensors:
    """Return elements that are named by rank (a letter) and index (a digit), because no collective changes them."""
    return [[Element(f"{chr(65 + rank)}{index}", (rank,)) for index in range(world_size)] for rank in range(world_size)]


def _numbers(world_size: int) -> Tensors:
    """Return numbers whose sums are easy to check: rank 0 holds 1, 2, 3, …, and rank r holds r + 1 times as much."""
    return [[Element((rank + 1) * (index + 1), (rank,)) for index in range(world_size)] for rank in range(world_size)]


def _sum(tensors: Tensors) -> list[Element]:
    """Return the sum of all ranks' tensors, element by element."""
    return [
        Element(sum(element.value for element in same_index), tuple(range(len(tensors))))
        for same_index in zip(*tensors, strict=True)
    ]


@dataclass(frozen=True)
class Collective:
    """What one collective does, as far as a diagram shows it."""

    title: str
    before: Callable[[int], Tensors]  # the tensors for a world size
    after: Callable[[Tensors], Tensors]  # the tensors computed from those before


def _broadcast(before: Tensors) -> Tensors:
    return [before[0] for _ in before]


def _reduce(before: Tensors) -> Tensors:
    return [_sum(before)] + [[UNDEFINED] * len(tensor) for tensor in before[1:]]


def _all_reduce(before: Tensors) -> Tensors:
    return [_sum(before) for _ in before]


def _scatter(before: Tensors) -> Tensors:
    return [[element] for element in before[0]]


def _gather(before: Tensors) -> Tensors:
    return [[element for [element] in before]] + [[] for _ in before[1:]]


def _all_gather(before: Tensors) -> Tensors:
    return [[element for [element] in before] for _ in before]


def _reduce_scatter(before: Tensors) -> Tensors:
    return [[element] for element in _sum(before)]


def _all_to_all(before: Tensors) -> Tensors:
    return [list(received) for received in zip(*before, strict=True)]


def _only_rank_0(world_size: int) -> Tensors:
    return [tensor if rank == 0 else [] for rank, tensor in enumerate(_named(world_size))]


def _one_each(world_size: int) -> Tensors:
    return [[Element(chr(65 + rank), (rank,))] for rank in range(world_size)]


_COLLECTIVES = {
    "broadcast": Collective("Broadcast: every rank receives a copy of rank 0's tensor", _named, _broadcast),
    "reduce": Collective("Reduce: rank 0 receives the sum of all tensors", _numbers, _reduce),
    "all_reduce": Collective("All-reduce: every rank receives the sum of all tensors", _numbers, _all_reduce),
    "scatter": Collective("Scatter: each rank receives a different element of rank 0", _only_rank_0, _scatter),
    "gather": Collective("Gather: rank 0 receives the elements of all ranks", _one_each, _gather),
    "all_gather": Collective("All-gather: every rank receives the elements of all ranks", _one_each, _all_gather),
    "reduce_scatter": Collective(
        "Reduce-scatter: each rank receives a different element of the sum", _numbers, _reduce_scatter
    ),
    "all_to_all": Collective("All-to-all: each rank sends a different element to every rank", _named, _all_to_all),
}
NAMES = tuple(_COLLECTIVES)


def before_and_after(name: str, world_size: int) -> tuple[Tensors, Tensors]:
    """Return what each rank holds before a collective, and after it."""
    before = _COLLECTIVES[name].before(world_size)
    return before, _COLLECTIVES[name].after(before)


def collective(name: str, world_size: int = WORLD_SIZE) -> Figure:
    """Draw what each rank holds before and after a collective.

    Rank 0 is the source of a broadcast or scatter, and the destination of a reduce or gather.

    Args:
        name: The function's name in torch.distributed, for example "all_reduce".
        world_size: How many ranks the diagram shows.

    Raises:
        ValueError: If there is no such collective.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    before, after = before_and_after(name, world_size)
    row_in, top_in = 0.66, 0.95
    drawing = Drawing(8.6, top_in + row_in * world_size + 0.6, _COLLECTIVES[name].title)
    left_in, right_in = _box_width_in(before), _box_width_in(after)
    left_x, right_x = 0.15, drawing.width_in - 0.15 - right_in
    drawing.text(left_x + left_in / 2, 0.72, "Before", "heading")
    drawing.text(right_x + right_in / 2, 0.72, "After", "heading")
    drawing.code((left_x + left_in + right_x) / 2, 0.72, name)
    for rank in range(world_size):
        y = top_in + row_in * rank
        _draw_rank(drawing, left_x, y, left_in, rank, before[rank], "no input")
        _draw_rank(drawing, right_x, y, right_in, rank, after[rank], "no output")
    for sender, receiver in _dependencies(after):
        ends = [
            top_in + 0.27 + row_in * own + 0.42 * ((other + 0.5) / world_size - 0.5)
            for own, other in ((sender, receiver), (receiver, sender))
        ]
        drawing.message((left_x + left_in + 0.04, ends[0]), (right_x - 0.04, ends[1]))
    drawing.text(0.15, top_in + row_in * world_size + 0.24, _key(after), "note", ha="left", linespacing=1.5)
    return drawing.finish()


def _box_width_in(tensors: Tensors) -> float:
    return 1.05 + max(1.4, CELL_IN[0] * max(map(len, tensors)))


def _draw_rank(drawing: Drawing, x: float, y: float, width: float, rank: int, tensor: list, empty: str) -> None:
    drawing.box(x, y, width, 0.54)
    drawing.rank_label(x + 0.08, y + 0.08, rank)
    for index, element in enumerate(tensor):
        drawing.cell(x + 0.93 + CELL_IN[0] * index, y + 0.08, str(element.value), element.ranks)
    if not tensor:
        drawing.text(x + 0.93, y + 0.27, empty, ha="left", style="italic", color="0.25")


def _dependencies(after: Tensors) -> list[tuple[int, int]]:
    """Return (sender, receiver) for each pair of ranks where one holds an element of the other after the collective."""
    return [
        (sender, receiver)
        for receiver, tensor in enumerate(after)
        for sender in sorted({rank for element in tensor for rank in element.ranks} - {receiver})
    ]


def _key(after: Tensors) -> str:
    elements = [element for tensor in after for element in tensor]
    sums = any(len(element.ranks) > 1 for element in elements)
    band = ", and the band of a sum has the colors of all ranks it contains" if sums else ""
    undefined = " “?” is a value that you cannot rely on." if UNDEFINED in elements else ""
    return (
        f"A cell has the color of the rank it came from{band}.\n"
        f"Arrows show who needs whose elements. The messages may take other paths.{undefined}"
    )


def ring() -> Figure:
    """Draw four ranks in a ring, and the way of chunk A around it, from rank 1 to rank 0."""
    drawing = Drawing(6.4, 2.75, "A ring: every rank sends only to its right neighbor")
    corners = [(0.5, 0.8), (4.6, 0.8), (4.6, 2.05), (0.5, 2.05)]  # of ranks 0 to 3
    size_in = (1.3, 0.42)
    for rank, (x, y) in enumerate(corners):
        drawing.rank_label(x, y, rank, *size_in)
    left, right = corners[0][0] + size_in[0] + 0.08, corners[1][0] - 0.08
    middles = [corners[rank][0] + size_in[0] / 2 for rank in (1, 0)]
    top, bottom = (corners[rank][1] + size_in[1] / 2 for rank in (0, 2))
    below, above = corners[0][1] + size_in[1] + 0.06, corners[2][1] - 0.06
    drawing.arrow((left, top), (right, top), linestyle="--", color="0.55")
    drawing.message((middles[0], below), (middles[0], above))
    drawing.message((right, bottom), (left, bottom))
    drawing.message((middles[1], above), (middles[1], below))
    between = (below + above) / 2
    drawing.text(middles[0] - 0.12, between, "step 1: A of rank 1", "note", ha="right")
    drawing.text((left + right) / 2, bottom + 0.22, "step 2: A of ranks 1 and 2", "note")
    drawing.text(middles[1] + 0.12, between, "step 3: A of ranks 1, 2 and 3", "note", ha="left")
    drawing.text((left + right) / 2, top - 0.2, "for chunks B, C and D only", "note", color="0.35")
    return drawing.finish()


_TREE_SIZE = 8


def tree_rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Return the messages of each round of a tree broadcast from rank 0, as (sender, receiver)."""
    rounds, holders = [], 1
    while holders < world_size:
        rounds.append([(rank, rank + holders) for rank in range(min(holders, world_size - holders))])
        holders *= 2
    return rounds


def tree_broadcast() -> Figure:
    """Draw which ranks hold the tensor after each round of a tree broadcast from rank 0, and the round's messages."""
    rounds = tree_rounds(_TREE_SIZE)
    row_in, top_in, left_in, right_in = 0.85, 1.05, 1.0, 1.35
    title = f"A tree broadcast to {_TREE_SIZE} ranks: every rank that has the tensor sends it on"
    drawing = Drawing(8.8, top_in + row_in * len(rounds) + 0.65, title)
    column_in = (drawing.width_in - left_in - right_in) / _TREE_SIZE
    middles = [left_in + column_in * (rank + 0.5) for rank in range(_TREE_SIZE)]
    for rank, x in enumerate(middles):
        drawing.text(x, 0.75, f"rank {rank}", weight="bold")
        drawing.line((x, top_in), (x, top_in + row_in * len(rounds) + 0.1), linewidth=0.8, color="0.75", zorder=0.2)
    holders = {0}
    for number, messages in enumerate([[], *rounds]):
        y = top_in + row_in * number
        for sender, receiver in messages:
            start = (middles[sender] + 0.1, y - row_in + CELL_IN[1] + 0.03)
            drawing.message(start, (middles[receiver] - 0.1, y - 0.03))
        holders |= {receiver for _, receiver in messages}
        drawing.text(0.15, y + CELL_IN[1] / 2, f"round {number}" if number else "start", ha="left")
        for rank, x in enumerate(middles):
            drawing.cell(x - CELL_IN[0] / 2, y, "A" if rank in holders else "", (0,) if rank in holders else ())
        copies = "1 copy" if len(holders) == 1 else f"{len(holders)} copies"
        drawing.text(drawing.width_in - right_in + 0.25, y + CELL_IN[1] / 2, copies, ha="left")
    return drawing.finish()
