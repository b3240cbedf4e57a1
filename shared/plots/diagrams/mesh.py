"""The diagram of a mesh with three axes: which ranks form a group along each of them."""

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import Drawing

_RANK_IN, _GAP_IN = (1.0, 0.5), (1.1, 0.8)  # the size of a rank, and the gap between two, as (x, y)


def mesh_3d() -> Figure:
    """Draw a mesh of 2 × 2 × 2 ranks on two hosts. Each host has a replica: two stages of two tensor-parallel ranks."""
    drawing = Drawing(9.0, 5.0, "A mesh of dp × pp × tp = 2 × 2 × 2: tp innermost, dp outermost")
    drawing.code(0.15, 0.62, 'init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))', ha="left")
    box_in = (3.9, 2.55)
    lefts, top = (0.2, 4.9), 1.2
    for replica, left in enumerate(lefts):
        drawing.box(left, top, *box_in, facecolor="none", edgecolor="black", linewidth=1.4, linestyle="--")
        drawing.text(
            left + 0.1, top + 0.22, f"host {replica}: replica {replica} (dp = {replica})", weight="bold", ha="left"
        )
        for stage in (0, 1):
            y = top + 0.55 + stage * (_RANK_IN[1] + _GAP_IN[1])
            for part in (0, 1):
                x = left + 0.4 + part * (_RANK_IN[0] + _GAP_IN[0])
                _draw_rank(drawing, x, y, 4 * replica + 2 * stage + part)
                if stage == 0:
                    below = y + _RANK_IN[1]
                    middle = x + _RANK_IN[0] / 2
                    drawing.message((middle, below + 0.03), (middle, below + _GAP_IN[1] - 0.03), arrowstyle="<|-|>")
                    drawing.text(middle + 0.12, below + _GAP_IN[1] / 2, "pp", ha="left")
            between = left + 0.4 + _RANK_IN[0]
            drawing.message((between + 0.03, y + 0.25), (between + _GAP_IN[0] - 0.03, y + 0.25), arrowstyle="<|-|>")
            drawing.text(between + _GAP_IN[0] / 2, y + 0.1, "tp")
            drawing.text(left + box_in[0] - 0.12, y + _RANK_IN[1] + 0.12, f"stage {stage}", "note", ha="right")
    right, y = lefts[0] + box_in[0], top + box_in[1] / 2
    drawing.message((right + 0.03, y), (lefts[1] - 0.03, y), arrowstyle="<|-|>", linestyle=(0, (4, 2)))
    drawing.text((right + lefts[1]) / 2, y - 0.18, "dp")
    rows = (
        ("tp", "in every layer: all-reduces of activations, which nothing hides", "0 1 | 2 3 | 4 5 | 6 7"),
        ("pp", "per micro-batch: an output and a gradient, to the next stage and back", "0 2 | 1 3 | 4 6 | 5 7"),
        ("dp", "per step: gradients, which may hide behind backward", "0 4 | 1 5 | 2 6 | 3 7"),
    )
    for index, (axis, what, groups) in enumerate(rows):
        y = top + box_in[1] + 0.4 + 0.33 * index
        drawing.text(0.3, y, axis, weight="bold", ha="left")
        drawing.text(0.75, y, what, ha="left")
        drawing.code(8.8, y, groups, ha="right")
    return drawing.finish()


def _draw_rank(drawing: Drawing, x: float, y: float, rank: int) -> None:
    drawing.rank_label(x, y, rank, *_RANK_IN)
