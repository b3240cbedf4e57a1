"""Diagrams of tensor parallelism: how a matrix is split, the two operators of a pair, and who holds which tokens."""

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import MESSAGE, Drawing

INPUT = (1, 2, 3, 4)
MATRIX = ((1, 0, 2, 1), (0, 1, 1, 2), (2, 1, 0, 1), (1, 2, 1, 0))
RANKS = 2
_SIDE = len(INPUT)
_CELL = (0.38, 0.38)


def own(rank: int) -> range:
    """Return the indices along the split dimension that belong to a rank."""
    part = _SIDE // RANKS
    return range(rank * part, (rank + 1) * part)


def product(rows: range, columns: range) -> list[int]:
    """Multiply some elements of the input with the same rows of the matrix, for some columns."""
    return [sum(INPUT[row] * MATRIX[row][column] for row in rows) for column in columns]


def split_matrix() -> Figure:
    """Draw the product of four elements and a 4 × 4 matrix that is split over two ranks by columns, and by rows."""
    drawing = Drawing(8.8, 5.6, f"Two ways to split y = x A over {RANKS} ranks")
    everything = range(_SIDE)
    drawing.name_rows(
        (1.0, "By columns", "Every rank needs all of x\nand computes its own\nelements of y."),
        (3.6, "By rows", "A rank needs only its own\nelements of x, and computes\none term of every element."),
    )
    x_left, a_left, y_left = 2.55, 4.55, 6.6
    for top, by_columns in ((1.0, True), (3.6, False)):
        _label(drawing, x_left, top, "x", _SIDE)
        _label(drawing, a_left, top, "A", _SIDE)
        for row in everything:
            owner = () if by_columns else (_owner(row),)
            drawing.cell(x_left + _CELL[0] * row, top + 0.57, f"{INPUT[row]}", owner, _CELL)
            for column in everything:
                owner = (_owner(column if by_columns else row),)
                x, y = a_left + _CELL[0] * column, top + _CELL[1] * row
                drawing.cell(x, y, f"{MATRIX[row][column]}", owner, _CELL)
        drawing.text(x_left + 1.77, top + 0.76, "·", size=20)
        drawing.text(a_left + 1.78, top + 0.76, "=", "title")
    _label(drawing, y_left, 1.57, "y", _SIDE)
    for rank in range(RANKS):
        for column, value in zip(own(rank), product(everything, own(rank)), strict=True):
            drawing.cell(y_left + _CELL[0] * column, 1.57, f"{value}", (rank,), _CELL)
    drawing.text(y_left + 0.76, 2.2, "complete elements:\nno communication", "note")
    for rank in range(RANKS):
        top = 3.4 + 0.55 * rank
        for column, value in enumerate(product(own(rank), everything)):
            drawing.cell(y_left + _CELL[0] * column, top, f"{value}", (rank,), _CELL)
        if rank:
            drawing.text(y_left - 0.12, top - 0.1, "+", "title")
    drawing.collective(y_left - 0.05, 4.45, 1.62, "all-reduce")
    drawing.message((y_left + 0.76, 4.8), (y_left + 0.76, 5.0))
    for column, value in enumerate(product(everything, everything)):
        drawing.cell(y_left + _CELL[0] * column, 5.03, f"{value}", tuple(range(RANKS)), _CELL)
    drawing.text(y_left + 1.65, 5.22, "y", "heading", weight="bold", ha="left")
    for rank in range(RANKS):
        drawing.rank_label(0.15 + 0.82 * rank, 5.03, rank)
    return drawing.finish()


def _owner(index: int) -> int:
    return index // (_SIDE // RANKS)


def _label(drawing: Drawing, left: float, top: float, name: str, columns: int) -> None:
    drawing.text(left + _CELL[0] * columns / 2, top - 0.2, name, "heading", weight="bold")


def conjugate_operators() -> Figure:
    """Draw an MLP split over two ranks, with the operators before and after it, in forward and in backward."""
    drawing = Drawing(8.8, 4.25, "A pair of layers: one all-reduce in forward, one in backward")
    lanes, height = (0.75, 1.75), 0.75
    stages = {"x A": 3.3, "gelu": 4.5, "· B": 5.7}
    bars = {"copy_to_ranks": 1.85, "sum_over_ranks": 6.75}
    for rank, top in enumerate(lanes):
        drawing.box(0.15, top, 8.5, height)
        drawing.rank_label(0.15, top, rank, 0.72, height)
        middle = top + height / 2
        drawing.cell(1.05, middle - 0.2, "x", (), (0.5, 0.4))
        for words, left in stages.items():
            name = "gelu" if words == "gelu" else f"{words}{'₀₁'[rank]}"
            drawing.cell(left, middle - 0.2, name, (rank,), (0.85, 0.4))
        drawing.cell(8.0, middle - 0.2, "y", (), (0.5, 0.4))
        points = [1.58, 1.82, 2.93, 3.27, 4.18, 4.47, 5.38, 5.67, 6.58, 6.72, 7.83, 7.97]
        for start, end in zip(points[::2], points[1::2], strict=True):
            drawing.arrow((start, middle), (end, middle))
    width = 1.05
    for name, left in bars.items():
        drawing.box(left, 0.62, width, 2.0, facecolor="white", edgecolor=MESSAGE, linewidth=1.8, zorder=1)
        drawing.code(left + width / 2, 1.62, name.replace("_ranks", "\n_ranks"))
    left_x, right_x = (left + width / 2 for left in bars.values())
    for y, name, words in (
        (3.1, "Forward", ("does nothing", "all-reduce of the terms of y")),
        (3.85, "Backward", ("all-reduce of the terms of\nthe gradient of x", "does nothing")),
    ):
        drawing.text(0.15, y, name, "heading", ha="left", weight="bold")
        for x, each in zip((left_x, right_x), words, strict=True):
            drawing.text(x, y, each, weight="bold" if "all" in each else "normal")
    drawing.arrow((4.0, 3.1), (5.4, 3.1))
    drawing.arrow((5.4, 3.85), (4.0, 3.85))
    return drawing.finish()


_REGIONS = (("norm", False), ("attention", True), ("norm", False), ("MLP", True))
_TOKENS = 4


def tokens_of(rank: int, inside_pair: bool, sequence_parallel: bool) -> tuple[int, ...]:
    """Return the tokens for which a rank computes a region of a block."""
    if inside_pair or not sequence_parallel:
        return tuple(range(_TOKENS))
    return tuple(own(rank))


def sequence_parallel() -> Figure:
    """Draw which tokens each of two ranks holds in a block, and what is communicated between its regions."""
    drawing = Drawing(8.8, 5.15, f"A block on {RANKS} ranks: who computes which of {_TOKENS} tokens")
    for top, title, split in (
        (0.55, "Tensor parallelism", False),
        (2.9, "Tensor parallelism with sequence parallelism", True),
    ):
        drawing.text(0.15, top + 0.1, title, "heading", ha="left", weight="bold")
        left, width, gap = 1.0, 1.12, 0.82
        for rank in range(RANKS):
            y = top + 0.35 + 0.68 * rank
            drawing.rank_label(0.15, y, rank, height=0.58)
            for number, (name, inside) in enumerate(_REGIONS):
                x = left + number * (width + gap)
                drawing.box(x, y, width, 0.58)
                held = tokens_of(rank, inside, split)
                cell_in = (0.24, 0.24)
                for token in range(_TOKENS):
                    cell_x = x + width / 2 + cell_in[0] * (token - _TOKENS / 2)
                    if token in held:
                        drawing.cell(cell_x, y + 0.29, f"{token}", (rank,), cell_in)
                    else:
                        drawing.absent(cell_x, y + 0.29, cell_in)
                drawing.text(x + width / 2, y + 0.14, f"½ {name}" if inside else name, "note")
        for number in range(1, len(_REGIONS) + 1):
            x = left + number * (width + gap) - gap + 0.06
            leaving = not _REGIONS[number - 1][1]
            words = ("all-\ngather" if leaving else "reduce-\nscatter") if split else "" if leaving else "all-\nreduce"
            if words:
                style = {"facecolor": "white", "edgecolor": MESSAGE, "linewidth": 1.8, "zorder": 1}
                drawing.box(x, top + 0.35, gap - 0.12, 1.26, **style)
                drawing.text(x + gap / 2 - 0.06, top + 0.98, words, "note")
            else:
                drawing.arrow((x, top + 0.98), (x + gap - 0.12, top + 0.98))
        drawing.text(0.15, top + 1.85, _SUMMARY[split], "note", ha="left")
    return drawing.finish()


_SUMMARY = {
    False: "Forward. Both ranks compute the same norms, for all tokens, and keep their inputs and outputs.",
    True: "Forward. Each rank computes the norms of its own tokens. An all-reduce has become its two halves.",
}
