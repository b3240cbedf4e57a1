"""Diagrams of several hosts: which ranks shard the model among themselves, and which hold the same shard."""

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import CELL_IN, Drawing

_RANKS_PER_HOST = 2


def hybrid_mesh() -> Figure:
    """Draw a mesh of 2 × 2 ranks: each host shards the model, and the hosts hold the same shards."""
    drawing = Drawing(8.8, 5.8, "Hybrid sharding on a 2 × 2 mesh: shard inside a host, replicate across hosts")
    drawing.code(0.15, 0.62, "mesh: [[0, 1], [2, 3]]", ha="left")
    left, box_in, rank_in = 1.35, 7.3, 2.0
    tops, rank_xs = (1.5, 4.0), (left + 0.2, left + box_in - 0.2 - rank_in)
    drawing.text(left, 1.05, "shard: the ranks of a host, fast links", ha="left", weight="bold")
    drawing.arrow((left, 1.25), (left + box_in, 1.25))
    drawing.text(0.35, 3.4, "replicate: the hosts, slow links", weight="bold", rotation=90)
    drawing.arrow((0.6, tops[0]), (0.6, tops[1] + 1.55))
    middle = left + box_in / 2
    for host, top in enumerate(tops):
        drawing.box(left, top, box_in, 1.55, facecolor="none", edgecolor="black", linewidth=1.4, linestyle="--")
        drawing.text(left - 0.1, top + 0.78, f"host {host}", "heading", ha="right", weight="bold")
        for shard, x in enumerate(rank_xs):
            _draw_rank(drawing, x, top + 0.15, rank_in, host * _RANKS_PER_HOST + shard, shard)
        drawing.collective(middle - 1.2, top + 0.35, 2.4, "all-gather of parameters")
        drawing.collective(middle - 1.2, top + 0.85, 2.4, "reduce-scatter of gradients")
        for y in (top + 0.52, top + 1.02):
            drawing.message((middle - 1.22, y), (rank_xs[0] + rank_in + 0.03, y), arrowstyle="<|-|>")
            drawing.message((middle + 1.22, y), (rank_xs[1] - 0.03, y), arrowstyle="<|-|>")
    for shard, x in enumerate(rank_xs):
        rank_middle, y = x + rank_in / 2, (tops[0] + 1.55 + tops[1]) / 2
        words = f"all-reduce of gradients\nof shard {shard}"
        drawing.collective(rank_middle - 1.0, y - 0.25, 2.0, words, 0.5)
        drawing.message((rank_middle, y - 0.27), (rank_middle, tops[0] + 1.43), arrowstyle="<|-|>")
        drawing.message((rank_middle, y + 0.27), (rank_middle, tops[1] + 0.12), arrowstyle="<|-|>")
    drawing.text(middle, (tops[0] + 1.55 + tops[1]) / 2, "the only messages between hosts", "note")
    return drawing.finish()


def _draw_rank(drawing: Drawing, x: float, y: float, width: float, rank: int, own_shard: int) -> None:
    drawing.box(x, y, width, 1.25)
    drawing.text(x + width / 2, y + 0.3, f"rank {rank}", "heading", weight="bold")
    cell_in = (0.8, CELL_IN[1])
    for shard in range(_RANKS_PER_HOST):
        cell_x = x + width / 2 + cell_in[0] * (shard - _RANKS_PER_HOST / 2)
        if shard == own_shard:
            drawing.cell(cell_x, y + 0.6, f"shard {shard}", (shard,), cell_in)  # a color for each shard
        else:
            drawing.absent(cell_x, y + 0.6, cell_in)
