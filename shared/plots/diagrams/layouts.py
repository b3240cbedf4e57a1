"""Diagrams of layouts: a weight that is tiled over a mesh, products of split matrices, and placements of a tensor."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots import rank_color
from shared.plots.diagrams.drawing import MESSAGE, Drawing

MESH = (4, 8)
WEIGHT = (2048, 4096)
DEVICE = 10  # the one that is colored
_TILE_IN = (0.45, 0.45)
_OWN = (1,)  # its color is that of rank 1


def devices_of_tile(tile: tuple[int, int], axes: tuple[str | None, str | None]) -> list[int]:
    """Return the devices that hold a tile, if the dimensions of the weight are split along these axes of the mesh."""
    found = []
    for device in range(MESH[0] * MESH[1]):
        row, column = divmod(device, MESH[1])
        index = {"x": row, "y": column}
        if all(axis is None or index[axis] == own for axis, own in zip(axes, tile, strict=True)):
            found.append(device)
    return found


def tiled_weight() -> Figure:
    """Draw a mesh of 4 × 8 devices, and three ways to lay out a weight on it."""
    height, width = WEIGHT
    drawing = Drawing(8.8, 6.15, f"A weight of {height} × {width} on a mesh of {MESH[0]} × {MESH[1]} devices")
    panels = (
        (0.55, 0.95, ("x", "y"), "the mesh", "axis y, of 8 devices"),
        (5.0, 0.95, ("x", "y"), 'P("x", "y")', "32 tiles of 512 × 512"),
        (0.55, 3.65, ("x", None), 'P("x", None)', "4 tiles of 512 × 4096, each on 8 devices"),
        (5.0, 3.65, (None, "y"), 'P(None, "y")', "8 tiles of 2048 × 512, each on 4 devices"),
    )
    for left, top, axes, name, words in panels:
        write = drawing.text if name == "the mesh" else drawing.code
        write(left, top - 0.2, name, size=11, ha="left", weight="bold")
        counts = [size if axis else 1 for size, axis in zip(MESH, axes, strict=True)]
        size_in = (_TILE_IN[0] * MESH[1] / counts[1], _TILE_IN[1] * MESH[0] / counts[0])
        for row in range(counts[0]):
            for column in range(counts[1]):
                owners = devices_of_tile((row, column), axes)
                position = (left + column * size_in[0], top + row * size_in[1])
                drawing.cell(*position, _listed(owners), _OWN if DEVICE in owners else (), size_in)
        drawing.text(left + 1.8, top + 1.97, words, "note")
    drawing.text(0.4, 0.95 + 0.9, "axis x, of 4 devices", "note", rotation=90)
    legend = f"Numbers are devices. Colored: device {DEVICE}, and the tile that it holds in each layout."
    drawing.text(0.15, 5.95, legend, "note", ha="left")
    return drawing.finish()


def _listed(devices: list[int]) -> str:
    if len(devices) == MESH[1]:
        return f"{devices[0]} to {devices[-1]}"
    return "\n".join(map(str, devices))


@dataclass(frozen=True)
class Product:
    """A case of x · A: the dimension along which each matrix is split (None: replicated), and what it costs.

    Attributes:
        missing: The matrix that the device has to gather, if any.
    """

    x: int | None
    a: int | None
    result: int | None
    words: str
    cost: str
    missing: str = ""


PRODUCTS = (
    Product(None, 1, 1, "complete columns: no communication", "0"),
    Product(0, None, 0, "complete rows: no communication", "0"),
    Product(1, 0, None, "a term of every element: all-reduce", "2f · S(result)"),
    Product(1, None, None, "columns of x are missing: all-gather", "f · S(x)", missing="x"),
    Product(None, 0, None, "rows of A are missing: all-gather", "f · S(A)", missing="A"),
)
_SPLIT, _MARKED = 4, 1  # devices, and the one whose memory is drawn
_X_IN, _A_IN, _RESULT_IN = (1.12, 0.52), (1.2, 0.72), (1.2, 0.52)


def five_products() -> Figure:
    """Draw what one of four devices holds of x and A in five layouts, and which collective the product needs."""
    drawing = Drawing(8.8, 5.75, "x · A on four devices: what device 1 holds, and what it needs")
    x_left, a_left, result_left, words_left = 0.95, 2.45, 4.05, 5.5
    for left, size_in, name in ((x_left, _X_IN, "x"), (a_left, _A_IN, "A"), (result_left, _RESULT_IN, "result")):
        drawing.text(left + size_in[0] / 2, 0.62, name, "heading", weight="bold")
    for number, each in enumerate(PRODUCTS, 1):
        middle = 1.2 + 0.92 * (number - 1)
        drawing.text(0.15, middle, f"case {number}", "heading", ha="left", weight="bold")
        _matrix(drawing, x_left, middle, _X_IN, each.x, each.missing == "x")
        drawing.text((x_left + _X_IN[0] + a_left) / 2, middle, "·", size=18)
        _matrix(drawing, a_left, middle, _A_IN, each.a, each.missing == "A")
        drawing.text((a_left + _A_IN[0] + result_left) / 2, middle, "=", "title")
        _matrix(drawing, result_left, middle, _RESULT_IN, each.result, False)
        drawing.text(words_left, middle - 0.13, each.words, "note", ha="left")
        drawing.text(words_left, middle + 0.13, f"a device sends {each.cost}", "note", ha="left")
    legend = "Colored: device 1 holds it. Empty: device 1 does not need it. Hatched: it must be gathered first."
    drawing.text(0.15, 5.55, legend, "note", ha="left")
    return drawing.finish()


def _matrix(
    drawing: Drawing, left: float, middle: float, size_in: tuple[float, float], dim: int | None, is_missing: bool
) -> None:
    """Draw a matrix around a height. If it is split along a dimension, only the marked device's part is colored."""
    width, height = size_in
    top = middle - height / 2
    if dim is None:
        drawing.cell(left, top, "", (_MARKED,), size_in)
        return
    part_in = (width, height / _SPLIT) if dim == 0 else (width / _SPLIT, height)
    for index in range(_SPLIT):
        x, y = left + dim * index * part_in[0], top + (1 - dim) * index * part_in[1]
        style = {"edgecolor": "0.35", "hatch": "////"} if is_missing else {}
        drawing.span(x, y, *part_in, **({"facecolor": rank_color(_MARKED)} if index == _MARKED else style))


TERMS = ((2, 5), (4, 3))  # one row per rank
MATRIX = ((1, 2), (3, 4))


def placements() -> Figure:
    """Draw a tensor of two elements on two ranks as a partial, a sharded and a replicated one, and the ways between."""
    drawing = Drawing(8.8, 4.95, "Placements of a tensor on two ranks, and what it takes to change them")
    total = [sum(column) for column in zip(*TERMS, strict=True)]
    boxes = {"Partial()": 0.95, "Shard(0)": 3.9, "Replicate()": 6.85}
    top, height, both = 1.3, 1.25, (0, 1)
    for name, left in boxes.items():
        drawing.box(left, top, 1.75, height)
        drawing.code(left + 0.875, top + 0.2, name, weight="bold")
        for rank in both:
            y = top + 0.38 + 0.43 * rank
            for column in both:
                position = (left + 0.38 + 0.5 * column, y)
                if name == "Partial()":
                    drawing.cell(*position, f"{TERMS[rank][column]}", (rank,))
                elif name == "Replicate()" or rank == column:
                    drawing.cell(*position, f"{total[column]}", both)
                else:
                    drawing.absent(*position)
    for rank in both:
        drawing.rank_label(0.15, top + 0.38 + 0.43 * rank, rank)
    drawing.text(0.15, top - 0.28, "A tensor of\n2 elements:", "note", ha="left")
    middle = top + height / 2
    for start, end, words in (
        ("Partial()", "Shard(0)", "reduce-\nscatter"),
        ("Shard(0)", "Replicate()", "all-\ngather"),
    ):
        left, right = boxes[start] + 1.8, boxes[end] - 0.05
        drawing.message((left, middle), (right, middle))
        drawing.text((left + right) / 2, middle - 0.3, words, "note")
    partial_x, shard_x, replicate_x = (left + 0.875 for left in boxes.values())
    drawing.line((partial_x, top - 0.05), (partial_x, 0.8), color=MESSAGE, linewidth=1.5)
    drawing.line((partial_x, 0.8), (replicate_x, 0.8), color=MESSAGE, linewidth=1.5)
    drawing.message((replicate_x, 0.8), (replicate_x, top - 0.05))
    drawing.text((partial_x + replicate_x) / 2, 0.65, "all-reduce", "note")
    bottom = top + height + 0.35
    drawing.line((replicate_x, top + height + 0.05), (replicate_x, bottom), linewidth=1.2)
    drawing.line((replicate_x, bottom), (shard_x, bottom), linewidth=1.2)
    drawing.arrow((shard_x, bottom), (shard_x, top + height + 0.05))
    drawing.text((shard_x + replicate_x) / 2, bottom + 0.15, "keep a part: nothing is sent", "note")
    legend = "The orange arrows, with a name, are collectives. A cell with a band in two colors is a sum."
    _draw_all_to_all(drawing, 3.25, (boxes["Shard(0)"], boxes["Replicate()"]))
    drawing.text(0.15, 4.75, legend, "note", ha="left")
    return drawing.finish()


def _draw_all_to_all(drawing: Drawing, top: float, lefts: tuple[float, float]) -> None:
    """Draw a tensor of 2 × 2 elements that is sharded along dimension 0, and along dimension 1."""
    both, middle = (0, 1), top + 0.65
    drawing.text(0.15, middle - 0.1, "A tensor of\n2 × 2 elements:", "note", ha="left")
    for dim, left in enumerate(lefts):
        drawing.box(left, top, 1.75, 1.25)
        drawing.code(left + 0.875, top + 0.2, f"Shard({dim})", weight="bold")
        for row in both:
            for column in both:
                owner = column if dim else row
                drawing.cell(left + 0.38 + 0.5 * column, top + 0.38 + 0.41 * row, f"{MATRIX[row][column]}", (owner,))
    left, right = lefts[0] + 1.8, lefts[1] - 0.05
    drawing.message((left, middle), (right, middle), arrowstyle="<|-|>")
    drawing.text((left + right) / 2, middle - 0.17, "all-to-all", "note")
