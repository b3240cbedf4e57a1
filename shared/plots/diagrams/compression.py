"""Diagrams of gradient compression: what is sent instead of the gradients, and what stays unsent."""

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import COMPUTE, MESSAGE, Drawing

RANKS = 2
LEVELS = 127
GRADIENTS = ((0.5, -0.2, 3.0, 1.8), (0.4, 0.1, -1.0, 2.2))  # of each rank, already divided by the number of ranks
_CELL = (0.62, 0.36)

Quantized = tuple[list[int], float]  # integers and their scale


def quantized(values: list[float]) -> Quantized:
    """Round values to multiples of a scale."""
    scale = max(map(abs, values)) / LEVELS
    return [round(value / scale) for value in values], scale


def values_of(block: Quantized) -> list[float]:
    return [integer * block[1] for integer in block[0]]


def shards_of(rank: int) -> list[Quantized]:
    """Return what a rank sends to each rank. In this diagram, a block is a shard."""
    size = len(GRADIENTS[rank]) // RANKS
    return [quantized(list(GRADIENTS[rank][at : at + size])) for at in range(0, size * RANKS, size)]


def sum_of(owner: int) -> list[float]:
    """Add up what a rank receives for its own shard."""
    received = [values_of(shards_of(rank)[owner]) for rank in range(RANKS)]
    return [sum(each) for each in zip(*received, strict=True)]


def _number(value: float, form: str = "g") -> str:
    return f"{value:{form}}".replace("-", "−")


def quantized_all_reduce() -> Figure:
    """Draw an all-reduce of int8: an all-to-all, a sum in float32, and an all-gather."""
    drawing = Drawing(8.8, 6.5, "An all-reduce that sends only 8-bit integers and their scales")
    tops = (1.0, 1.9, 3.15, 3.95, 5.15)
    titles = ("gradients and unsent", "rounded", "received", "sum, rounded again", "result")
    notes = (
        "float32",
        "int8, and a scale per block",
        "from both ranks,\nfor its own shard only",
        "added up in float32",
        "the same bits on both ranks",
    )
    drawing.name_rows(*[(top + 0.05, title, note) for top, title, note in zip(tops, titles, notes, strict=True)])
    for rank in range(RANKS):
        left = 2.6 + 3.15 * rank
        drawing.rank_label(left + 0.88, 0.5, rank)
        for index, value in enumerate(GRADIENTS[rank]):
            drawing.cell(left + _CELL[0] * index, tops[0], _number(value), (rank,), _CELL)
        _draw_shards(drawing, left, tops[1], shards_of(rank), [(rank,)] * RANKS)
        for peer in range(RANKS):
            integers, scale = shards_of(peer)[rank]
            for index, integer in enumerate(integers):
                at = left + _CELL[0] * (index + 2 * peer)
                drawing.cell(at, tops[2], _number(integer), (peer,), _CELL)
            drawing.text(left + _CELL[0] * (2 * peer + 1), tops[2] + 0.5, f"· {scale:.3f}", "note")
        owned = quantized(sum_of(rank))
        for index, integer in enumerate(owned[0]):
            drawing.cell(left + _CELL[0] * (index + 1), tops[3], _number(integer), (0, 1), _CELL)
        drawing.text(left + _CELL[0] * 2, tops[3] + 0.5, f"· {owned[1]:.3f}", "note")
        result = [value for owner in range(RANKS) for value in values_of(quantized(sum_of(owner)))]
        for index, value in enumerate(result):
            drawing.cell(left + _CELL[0] * index, tops[4], _number(value, ".2f"), (0, 1), _CELL)
    drawing.collective(2.6, 2.7, 5.63, "all-to-all: rank r gets every rank's r-th shard", 0.32)
    drawing.collective(2.6, 4.7, 5.63, "all-gather", 0.32)
    drawing.text(
        0.15,
        5.9,
        "What rounding has changed stays unsent: the first error on the rank that has rounded its "
        "gradients,\nthe second one on the rank that has added up the shard.",
        "note",
        ha="left",
        va="top",
    )
    return drawing.finish()


def _draw_shards(drawing: Drawing, left: float, top: float, shards: list[Quantized], ranks: list[tuple]) -> None:
    for number, ((integers, scale), owners) in enumerate(zip(shards, ranks, strict=True)):
        for index, integer in enumerate(integers):
            drawing.cell(left + _CELL[0] * (index + 2 * number), top, _number(integer), owners, _CELL)
        drawing.text(left + _CELL[0] * (2 * number + 1), top + 0.5, f"· {scale:.3f}", "note")


UNSENT = ((5, -1, 0, 8, 2, -3, 1, 0), (1, -7, 2, 6, 0, 1, -2, 3))
K = 2


def largest(rank: int) -> list[int]:
    """Return the indices of the elements that a rank sends, in order."""
    by_size = sorted(range(len(UNSENT[rank])), key=lambda index: -abs(UNSENT[rank][index]))
    return sorted(by_size[:K])


def top_k() -> Figure:
    """Draw which elements two ranks send, what they all get, and what stays unsent."""
    drawing = Drawing(8.8, 4.5, f"Top-k: each rank sends its {K} largest of {len(UNSENT[0])} elements")
    size, left = (0.62, 0.36), 2.7
    drawing.name_rows(
        (0.62, "unsent", "before the step, and\nwhat is chosen of it"),
        (2.0, "all-gather", "indices and values"),
        (2.75, "result", "the same on all ranks"),
        (3.5, "unsent", "after the step"),
    )
    for index in range(len(UNSENT[0])):
        drawing.text(left + size[0] * (index + 0.5), 0.52, f"{index}", "note", color="0.35")
    for rank, values in enumerate(UNSENT):
        top = 0.65 + 0.5 * rank
        drawing.rank_label(left - 0.8, top, rank, height=size[1])
        for index, value in enumerate(values):
            drawing.cell(left + size[0] * index, top, _number(value), (rank,) if index in largest(rank) else (), size)
    drawing.collective(left, 1.85, size[0] * 8, "", 0.5)
    at = left + 0.12
    for rank in range(RANKS):
        for index in largest(rank):
            drawing.cell(at, 1.92, f"[{index}] {_number(UNSENT[rank][index])}", (rank,), (1.05, size[1]))
            at += 1.2
    for index in range(len(UNSENT[0])):
        senders = tuple(rank for rank in range(RANKS) if index in largest(rank))
        total = sum(UNSENT[rank][index] for rank in senders)
        drawing.cell(left + size[0] * index, 2.72, _number(total), senders, size)
    for rank, values in enumerate(UNSENT):
        top = 3.4 + 0.5 * rank
        drawing.rank_label(left - 0.8, top, rank, height=size[1])
        for index, value in enumerate(values):
            drawing.cell(left + size[0] * index, top, "0" if index in largest(rank) else _number(value), (), size)
    return drawing.finish()


# ΣM is P · Qᵀ and a rest that neither P nor Q can see: the rest times Q is 0, and so is Pᵀ times the rest.
COLUMN = (3, 2, 1, -1, 1, 0)  # P is a quarter of it, so that its length is 1
ROW = (1, -1, 2, 0, 1, 0, -2, 1)  # Q is four times as large
REST = (
    (0, 0, 1, 0, 0, -1, 1, 0),
    (0, 0, -1, 1, 0, 1, -1, 0),
    (1, 1, 0, -1, 1, 1, 0, -1),
    (1, 1, 1, 1, 0, 0, 1, 0),
    (0, 0, 0, 0, -1, 0, 0, 1),
    (0, 0, 0, -1, 1, 1, 0, -1),
)
P, Q = [each / 4 for each in COLUMN], [4 * each for each in ROW]
_ROW_IN = 0.27


def low_rank() -> Figure:
    """Draw a matrix, its two thin factors, their product, what stays unsent, and the two all-reduces."""
    drawing = Drawing(8.8, 6.25, "PowerSGD with r = 1: a matrix as a product of two thin ones")
    rows, columns = len(COLUMN), len(ROW)
    product = [[p * q + 0 for q in Q] for p in P]  # not −0
    matrix = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(product, REST, strict=True)]
    left, right, above, below = 0.35, 5.15, 0.95, 3.1
    _draw_matrix(drawing, left, above, f"ΣM: {rows} × {columns} = {rows * columns} elements", matrix)
    drawing.text(4.05, above + _ROW_IN * rows / 2, "≈", "title")
    _draw_matrix(drawing, 4.35, above, f"P: {rows}", [[each] for each in P], 0.54, sent=True)
    _draw_matrix(drawing, right, above, f"Qᵀ: {columns}", [Q], sent=True)
    drawing.text(
        right,
        above + 0.5,
        f"sent: {rows} + {columns} = {rows + columns} elements\ninstead of {rows * columns}",
        ha="left",
        va="top",
    )
    _draw_matrix(drawing, left, below, "P · Qᵀ: the result on all ranks", product)
    _draw_matrix(drawing, right, below, "ΣM − P · Qᵀ: what stays unsent", REST)
    _draw_power_step(drawing, 5.0)
    note = "Each rank subtracts P · (Mᵀ · P)ᵀ, what it has sent itself, from its own M."
    drawing.text(0.35, 5.95, f"{note} The next step starts with the summed Q.", "note", ha="left")
    return drawing.finish()


def _draw_matrix(
    drawing: Drawing, x: float, y: float, name: str, rows, width: float = 0.42, sent: bool = False
) -> None:
    """Draw the elements of a matrix under its name. What is sent has the band of a sum of both ranks."""
    drawing.text(x, y - 0.17, name, ha="left")
    for index, row in enumerate(rows):
        for column, value in enumerate(row):
            at = (x + width * column, y + _ROW_IN * index)
            drawing.cell(*at, _number(value), (0, 1) if sent else (), (width, _ROW_IN))


def _draw_power_step(drawing: Drawing, y: float) -> None:
    x, width = 0.35, 1.22
    steps = ("M · Q", "all-reduce", "orthogonalize", "Mᵀ · P", "all-reduce", "P · Qᵀ")
    for number, words in enumerate(steps):
        if words == "all-reduce":
            drawing.collective(x, y, width, words, 0.4)
            drawing.text(x + width / 2, y + 0.58, "of P" if number == 1 else "of Q", "note")
        else:
            drawing.box(x, y, width, 0.4, facecolor=COMPUTE, zorder=1)
            drawing.text(x + width / 2, y + 0.2, words)
        if number + 1 < len(steps):
            drawing.arrow((x + width + 0.02, y + 0.2), (x + width + 0.15, y + 0.2))
        x += width + 0.18


STEPS = 8


def local_sgd(inner_steps: int = 4) -> Figure:
    """Draw two ranks that exchange gradients in every step, and two that exchange parameters every few steps."""
    drawing = Drawing(8.8, 4.0, f"Exchanging in every step, or every {inner_steps} steps")
    left, width, gap = 2.6, 0.5, 0.23
    for top, name, note, every in (
        (0.65, "Data parallelism", "exchanges gradients", 1),
        (2.25, "Local SGD", "exchanges parameters", inner_steps),
    ):
        drawing.name_rows((top + 0.15, name, note))
        for rank in range(RANKS):
            y, x = top + 0.6 * rank, left
            drawing.rank_label(1.82, y, rank, width=0.7, height=0.42)
            for step in range(STEPS):
                drawing.span(x, y, width, 0.42, "step", facecolor=COMPUTE)
                x += width
                if (step + 1) % every == 0:
                    style = {"facecolor": "white", "edgecolor": MESSAGE, "linewidth": 1.8, "zorder": 1}
                    if rank == 0:
                        drawing.box(x + 0.03, top - 0.05, gap - 0.06, 1.12, **style)
                    x += gap
    drawing.box(left, 3.6, 0.17, 0.26, facecolor="white", edgecolor=MESSAGE, linewidth=1.8, zorder=1)
    drawing.text(
        2.9,
        3.73,
        "an all-reduce of Ψ elements. Between them, parameters differ in local SGD.",
        "note",
        ha="left",
    )
    return drawing.finish()
