"""Diagrams of context parallelism: keys that travel around a ring, the causal mask's work, and tokens for heads."""

from collections.abc import Callable

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import MESSAGE, Drawing

RANKS = 4
CHUNKS = 2 * RANKS
_SMALL = (0.36, 0.36)


def source_of(rank: int, step: int) -> int:
    """Return whose keys a rank has in a step of the ring."""
    return (rank - step) % RANKS


def ring_attention() -> Figure:
    """Draw whose keys and values each of four ranks has in each step of the ring."""
    drawing = Drawing(8.8, 4.55, "Ring attention: queries stay, keys and values move one rank per step")
    lefts, tops, height = (2.35, 4.05, 5.75, 7.45), (1.05, 1.9, 2.75, 3.6), 0.6
    drawing.text(1.42, 0.72, "stays", "heading", weight="bold")
    for step, left in enumerate(lefts):
        drawing.text(left + 0.55, 0.72, f"step {step}", "heading", weight="bold")
    for rank, top in enumerate(tops):
        drawing.rank_label(0.15, top, rank, 0.72, height)
        drawing.cell(1.1, top + 0.1, f"Q{rank}", (rank,), (0.64, 0.4))
        for step, left in enumerate(lefts):
            drawing.box(left, top, 1.1, height)
            source = source_of(rank, step)
            drawing.cell(left + 0.13, top + 0.1, f"K{source} V{source}", (source,), (0.84, 0.4))
    for step, left in enumerate(lefts[:-1]):
        for rank, top in enumerate(tops):
            start = left + 1.12, top + height / 2
            to = (rank + 1) % RANKS
            if to:
                drawing.message(start, (lefts[step + 1] - 0.03, tops[to] + height / 2 - 0.12))
            else:
                drawing.line(start, (start[0] + 0.16, start[1]), color=MESSAGE, linewidth=1.5)
                end = lefts[step + 1] - 0.03, tops[0] + height / 2
                drawing.message((end[0] - 0.2, end[1]), end)
    drawing.text(0.15, 4.37, "An arrow that leaves rank 3 goes on at rank 0.", "note", ha="left")
    return drawing.finish()


def contiguous(chunk: int) -> int:
    """Return the rank that has a chunk if each rank gets one contiguous part."""
    return chunk // 2


def zigzag(chunk: int) -> int:
    """Return the rank that has a chunk in the zigzag order."""
    return min(chunk, CHUNKS - 1 - chunk)


def work_of(owner: Callable[[int], int]) -> list[float]:
    """Return how many pairs of chunks each rank computes. A pair on the diagonal is half hidden."""
    work = [0.0] * RANKS
    for chunk in range(CHUNKS):
        work[owner(chunk)] += chunk + 0.5
    return work


def causal_orders() -> Figure:
    """Draw which rank computes which part of the causal triangle, in two orders."""
    drawing = Drawing(9.0, 5.5, f"The causal triangle on {RANKS} ranks: {CHUNKS} × {CHUNKS} pairs of chunks")
    drawing.text(0.15, 0.6, "A cell is the work of a pair of chunks. Its color is the rank of the queries.", ha="left")
    width, height = _SMALL
    top = 1.45
    for left, name, owner in ((0.95, "contiguous", contiguous), (5.45, "zigzag", zigzag)):
        drawing.text(left + CHUNKS * width / 2, 0.98, name, "heading", weight="bold")
        drawing.text(left - 0.55, top + CHUNKS * height / 2, "chunk of queries", "note", rotation=90)
        drawing.text(left + CHUNKS * width / 2, top + CHUNKS * height + 0.4, "chunk of keys", "note")
        for query in range(CHUNKS):
            y = top + height * query
            drawing.text(left - 0.2, y + height / 2, f"{query}", "note")
            drawing.text(left + width * (query + 0.5), top + CHUNKS * height + 0.17, f"{query}", "note")
            for key in range(query + 1):
                words = "1" if key < query else "½"
                drawing.cell(left + width * key, y, words, (owner(query),), _SMALL)
        for rank, work in enumerate(work_of(owner)):
            x = left + 0.78 * rank
            drawing.rank_label(x, 4.85, rank, 0.7, 0.32)
            drawing.text(x + 0.35, 5.32, f"{work:g} pairs")
    return drawing.finish()


def tokens_for_heads() -> Figure:
    """Draw what each of four ranks has before and after the all-to-all of Ulysses."""
    drawing = Drawing(8.8, 3.3, "Ulysses: an all-to-all swaps tokens for heads")
    width, height = 0.5, 0.42
    for left, by_tokens, words in ((0.9, True, "some tokens of all heads"), (5.9, False, "all tokens of some heads")):
        drawing.text(left + 2 * width, 0.72, words, "heading", weight="bold")
        drawing.text(left + 2 * width, 1.0, "heads", "note")
        drawing.text(left - 0.42, 1.15 + 2 * height, "tokens", "note")
        for token in range(RANKS):
            for head in range(RANKS):
                rank = token if by_tokens else head
                drawing.cell(left + width * head, 1.15 + height * token, f"{rank}", (rank,), (width, height))
    drawing.collective(3.25, 1.4, 1.9, "all-to-all")
    drawing.message((3.25, 1.95), (5.15, 1.95))
    drawing.message((5.15, 2.5), (3.25, 2.5))
    drawing.text(4.2, 2.12, "queries, keys, values", "note")
    drawing.text(4.2, 2.67, "outputs", "note")
    drawing.text(0.9, 3.05, "The number and the color are those of the rank that has the block.", "note", ha="left")
    return drawing.finish()
