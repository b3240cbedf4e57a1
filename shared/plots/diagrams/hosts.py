"""Diagrams of ranks: the processes that run one script, data parallelism on them, and their places on several hosts."""

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import CELL_IN, MESSAGE, WORLD_SIZE, Drawing


def processes() -> Figure:
    """Draw one script and the processes that run it, each with its rank, its device and its memory."""
    drawing = Drawing(8.8, 5.15, f"One script, {WORLD_SIZE} processes: each has a rank, a device and memory of its own")
    width, gap = 1.6, 0.42
    left = (drawing.width_in - WORLD_SIZE * width - (WORLD_SIZE - 1) * gap) / 2
    middle = drawing.width_in / 2
    drawing.box(middle - 1.3, 0.55, 2.6, 0.78, facecolor="white", edgecolor="black")
    drawing.code(middle - 1.15, 0.94, "rank = dist.get_rank()\nx = 10 * rank", ha="left", linespacing=1.6)
    drawing.text(middle - 1.42, 0.94, "the script", ha="right")
    outline = {"facecolor": "none", "linestyle": "--", "linewidth": 1.4, "edgecolor": "black"}
    group_y, process_y, messages_y = 1.72, 2.0, 4.12
    group_in = max(5.6, drawing.width_in - 2 * left + 0.4)
    drawing.box(middle - group_in / 2, group_y, group_in, 3.25, **outline)
    for rank in range(WORLD_SIZE):
        x = left + rank * (width + gap)
        drawing.arrow((middle + (rank - (WORLD_SIZE - 1) / 2) * 0.35, 1.36), (x + width / 2, process_y - 0.06))
        drawing.box(x, process_y, width, 1.85)
        drawing.rank_label(x, process_y, rank, width)
        drawing.text(x + width / 2, process_y + 0.54, f"process on GPU {rank}", "note")
        drawing.box(x + 0.15, process_y + 0.74, width - 0.3, 0.96, facecolor="white")
        drawing.text(x + width / 2, process_y + 0.91, "memory", "note")
        drawing.code(x + 0.45, process_y + 1.31, "x =")
        drawing.cell(x + 0.7, process_y + 1.12, f"{10 * rank}", (rank,))
        drawing.message((x + width / 2, process_y + 1.88), (x + width / 2, messages_y), arrowstyle="<|-|>")
    drawing.collective(left, messages_y, drawing.width_in - 2 * left, "messages", height=0.28)
    drawing.text(middle, 4.62, f"process group: {WORLD_SIZE} ranks that can send each other messages", weight="bold")
    drawing.text(middle, 4.84, "They share no memory, so a message is the only way from one rank to another.", "note")
    return drawing.finish()


def data_parallelism() -> Figure:
    """Draw data parallelism: replicate the parameters once; in each step, slice the batch and average the gradients.

    The model has one parameter w, and its gradient on rank r is 2r + 1, so the average is the number of ranks.
    """
    drawing = Drawing(8.8, 6.75, f"Replicate, slice, average: data parallelism on {WORLD_SIZE} ranks")
    left, cell_in = 2.5, (1.0, CELL_IN[1])
    column = (drawing.width_in - left - 0.15) / WORLD_SIZE
    everyone = tuple(range(WORLD_SIZE))
    samples = f"0 to {2 * WORLD_SIZE - 1}"
    stages = {
        1.0: ("1  Replicate", "Once, before training: every\nrank receives rank 0's w."),
        2.35: ("2  Slice", f"In each step, every rank takes\ndifferent samples ({samples})."),
        3.35: ("3  Compute", "Forward and backward give\neach rank its own gradient."),
        4.35: ("4  Average", "An all-reduce and a division\ngive every rank the mean."),
        5.75: ("5  Update", "Each rank subtracts 0.1 times\nthe mean, so w is still equal\non all ranks."),
    }
    for y, (stage, explanation) in stages.items():
        drawing.text(0.15, y + 0.19, stage, "heading", ha="left", weight="bold")
        drawing.text(0.15, y + 0.36, explanation, "note", ha="left", va="top", linespacing=1.3)
    for rank in everyone:
        x, middle = left + column * rank + 0.07, left + column * (rank + 0.5)
        cell_x = middle - cell_in[0] / 2
        drawing.box(x, 0.5, column - 0.14, 6.1)
        drawing.rank_label(x, 0.5, rank, column - 0.14)
        drawing.arrow((middle, 1.34), (middle, 1.56), color=MESSAGE)
        drawing.cell(cell_x, 1.6, "w = 2", (0,), cell_in)
        for index in range(2):
            drawing.cell(cell_x + CELL_IN[0] * index, 2.35, f"{2 * rank + index}", (rank,))
        drawing.arrow((middle, 2.77), (middle, 3.31))
        drawing.cell(cell_x, 3.35, f"gradient {2 * rank + 1}", (rank,), cell_in)
        drawing.message((middle, 3.77), (middle, 4.31))
        drawing.message((middle, 4.69), (middle, 4.91))
        drawing.cell(cell_x, 4.95, f"mean {WORLD_SIZE}", everyone, cell_in)
        drawing.arrow((middle, 5.37), (middle, 5.71))
        drawing.cell(cell_x, 5.75, f"w = {2 - 0.1 * WORLD_SIZE:.1f}", everyone, cell_in)
    across = drawing.width_in - left - 0.25
    drawing.collective(left + 0.05, 1.0, across, "broadcast from rank 0")
    terms = " + ".join(f"{2 * rank + 1}" for rank in everyone)
    drawing.collective(left + 0.05, 4.35, across, f"all-reduce, then division: ({terms}) / {WORLD_SIZE} = {WORLD_SIZE}")
    return drawing.finish()


# -- the diagram of a mesh with three axes: which ranks form a group along each of them


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
                _draw_mesh_rank(drawing, x, y, 4 * replica + 2 * stage + part)
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
        ("tp", "in every layer: all-reduces of activations, mostly exposed", "0 1 | 2 3 | 4 5 | 6 7"),
        ("pp", "per micro-batch: an output and a gradient, to the next stage and back", "0 2 | 1 3 | 4 6 | 5 7"),
        ("dp", "per step: gradients, which may hide behind backward", "0 4 | 1 5 | 2 6 | 3 7"),
    )
    for index, (axis, what, groups) in enumerate(rows):
        y = top + box_in[1] + 0.4 + 0.33 * index
        drawing.text(0.3, y, axis, weight="bold", ha="left")
        drawing.text(0.75, y, what, ha="left")
        drawing.code(8.8, y, groups, ha="right")
    return drawing.finish()


def _draw_mesh_rank(drawing: Drawing, x: float, y: float, rank: int) -> None:
    drawing.rank_label(x, y, rank, *_RANK_IN)


# -- the diagram of a cluster: hosts of GPUs, the links between them, and a layout on top


HOSTS, GPUS, TP, STAGES = 4, 8, 4, 4


def stage_of(gpu: int) -> int:
    """Return the stage of a GPU in DP 2 × PP 4 × TP 4, with tp innermost and dp outermost."""
    return gpu // TP % STAGES


def cluster_of_hosts() -> Figure:
    """Draw four hosts of eight GPUs, with the layout DP 2 × PP 4 × TP 4."""
    drawing = Drawing(9.0, 4.75, "4 hosts × 8 A100, with DP 2 × PP 4 × TP 4. The number is a GPU's stage")
    left, top, step_in, box_in, cell_in = 0.15, 1.2, 2.2, (2.02, 2.15), (0.44, 0.42)
    for host in range(HOSTS):
        x = left + host * step_in
        drawing.box(x, top, *box_in)
        drawing.text(x + box_in[0] / 2, top - 0.2, f"host {host}", "heading", weight="bold")
        for index in range(GPUS):
            gpu = host * GPUS + index
            row, column = divmod(index, TP)
            cell = (x + 0.13 + column * cell_in[0], top + 0.15 + row * 0.98)
            drawing.cell(*cell, f"{stage_of(gpu)}", (stage_of(gpu),), cell_in)
        drawing.collective(x + 0.13, top + 0.65, TP * cell_in[0], "NVLink: tp, and pp", 0.4)
        drawing.text(x + box_in[0] / 2, top + 1.73, "8 adapters, 24 GB/s each", "note")
        middle = x + box_in[0] / 2
        drawing.message((middle, top + 1.86), (middle, top + 2.5), arrowstyle="<|-|>")
    drawing.collective(left, top + 2.52, 3 * step_in + box_in[0], "switches between the hosts: pp and dp", 0.4)
    for replica in (0, 1):
        begin, end = (left + host * step_in for host in (2 * replica, 2 * replica + 1))
        drawing.line((begin, 0.78), (end + box_in[0], 0.78), color=MESSAGE, linewidth=2)
        middle = (begin + end + box_in[0]) / 2
        drawing.text(middle, 0.62, f"replica {replica} (dp = {replica})", weight="bold")
    drawing.text(left, 4.35, "tp: the four GPUs of a color, inside a host, in every layer.", "note", ha="left")
    words = "pp: from stage to stage, per micro-batch. dp: GPUs of the same stage in both replicas, once per step."
    drawing.text(left, 4.58, words, "note", ha="left")
    return drawing.finish()


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
