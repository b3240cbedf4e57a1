"""Diagrams of tensor parallelism: how layers and the loss are split, the two operators of a pair, who holds what."""

import math

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


HEADS = 4
_SUBSCRIPTS = "₀₁₂₃"


def split_heads() -> Figure:
    """Draw the matrices of attention with four heads, split over two ranks: columns of QKV, rows of the projection."""
    drawing = Drawing(8.8, 3.15, f"Attention with {HEADS} heads on {RANKS} ranks")
    top, size = 0.95, (0.62, 0.42)
    left = 1.05
    drawing.text(left + size[0] * HEADS / 2, top - 0.3, "query_key_value", "heading", weight="bold")
    for head in range(HEADS):
        drawing.text(left + size[0] * (head + 0.5), top - 0.1, f"head {head}", "note")
        for row, name in enumerate("QKV"):
            words = f"{name}{_SUBSCRIPTS[head]}"
            drawing.cell(left + size[0] * head, top + size[1] * row, words, (_owner(head),), size)
    for row, name in enumerate(("queries", "keys", "values")):
        drawing.text(left - 0.1, top + size[1] * (row + 0.5), name, "note", ha="right")
    middle, project_left = top + 0.84, 5.0
    drawing.arrow((3.62, middle), (project_left - 0.1, middle))
    drawing.text(4.26, middle - 0.32, "attention\nof own heads", "note")
    drawing.text(4.26, middle + 0.22, "m₀ … m₃", "note")
    drawing.text(project_left + 0.55, top - 0.3, "project", "heading", weight="bold")
    for head in range(HEADS):
        drawing.cell(project_left, top + size[1] * head, f"P{_SUBSCRIPTS[head]}", (_owner(head),), (1.1, size[1]))
    for rank in range(RANKS):
        terms = " + ".join(f"m{_SUBSCRIPTS[head]}P{_SUBSCRIPTS[head]}" for head in own(rank))
        y = top + 2 * size[1] * rank + 0.22
        drawing.cell(6.4, y, terms, (rank,), (1.15, 0.4))
        drawing.arrow((6.14, y + 0.2), (6.38, y + 0.2))
        drawing.arrow((7.57, y + 0.2), (7.76, y + 0.2))
    style = {"facecolor": "white", "edgecolor": MESSAGE, "linewidth": 1.8, "zorder": 1}
    drawing.box(7.78, top + 0.08, 0.82, 1.52, **style)
    drawing.text(8.19, middle, "all-\nreduce", "note")
    for rank in range(RANKS):
        drawing.rank_label(0.15 + 0.82 * rank, 2.72, rank)
    drawing.text(
        1.95, 2.91, "A head needs a block of each of Q, K and V, and a block of rows of project.", "note", ha="left"
    )
    return drawing.finish()


LOGITS = (1, 3, 0, 2, 2, 1, 4, 0)  # of one position, for a vocabulary of eight tokens
TARGET = 1


def loss_terms() -> list[tuple[float, float, float]]:
    """Return what each rank contributes to the loss: its largest logit, its sum and its term of the target's logit."""
    part, largest = len(LOGITS) // RANKS, max(LOGITS)
    found = []
    for rank in range(RANKS):
        tokens = range(rank * part, (rank + 1) * part)
        total = sum(math.exp(LOGITS[token] - largest) for token in tokens)
        found.append(
            (max(LOGITS[token] for token in tokens), total, LOGITS[TARGET] - largest if TARGET in tokens else 0)
        )
    return found


def split_loss() -> Figure:
    """Draw the loss of one position, whose logits are split over two ranks: three numbers are all-reduced."""
    drawing = Drawing(8.8, 3.4, f"The loss of one position: {len(LOGITS)} logits on {RANKS} ranks, target {TARGET}")
    lanes, part, size = (0.95, 1.6), len(LOGITS) // RANKS, (0.36, 0.4)
    columns = (2.95, 4.75, 6.55)
    heads = ("largest logit", "sum of exp(z − m)", "target’s z − m")
    results = [max(each[0] for each in loss_terms()), *(sum(each[i] for each in loss_terms()) for i in (1, 2))]
    drawing.text(1.0 + size[0] * part / 2, 0.78, "logits z", "note")
    for rank, top in enumerate(lanes):
        drawing.rank_label(0.15, top, rank, height=size[1])
        for index in range(part):
            token = rank * part + index
            drawing.cell(1.0 + size[0] * index, top, f"{LOGITS[token]}", (rank,), size)
        for column, value in zip(columns, loss_terms()[rank], strict=True):
            drawing.cell(column, top, _number(value), (rank,), (0.62, size[1]))
            drawing.arrow((column + 0.64, top + 0.2), (column + 0.8, top + 0.2))
        drawing.arrow((2.5, top + 0.2), (2.9, top + 0.2))
    style = {"facecolor": "white", "edgecolor": MESSAGE, "linewidth": 1.8, "zorder": 1}
    for column, head, op, name, result in zip(
        columns, heads, ("MAX", "SUM", "SUM"), ("m", "sum", "target"), results, strict=True
    ):
        drawing.text(column + 0.6, 0.78, head, "note")
        drawing.box(column + 0.82, 0.92, 0.62, 1.11, **style)
        drawing.text(column + 1.13, 1.48, op)
        drawing.message((column + 1.13, 2.05), (column + 1.13, 2.28))
        drawing.cell(column + 0.82, 2.3, _number(result), tuple(range(RANKS)), (0.62, size[1]))
        drawing.text(column + 0.76, 2.5, name, "note", ha="right")
    loss = math.log(results[1]) - results[2]
    words = f"loss = log(sum) − target = log {results[1]:.2f} − ({_number(results[2])}) = {loss:.2f}"
    drawing.text(0.15, 3.08, words, "heading", ha="left", weight="bold")
    return drawing.finish()


def _number(value: float) -> str:
    return f"{value:.2f}" if value % 1 else f"{value:.0f}".replace("-", "−")


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
