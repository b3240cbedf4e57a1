"""Diagrams of ranks: the processes that run one script, and data parallelism on them."""

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import CELL_IN, MESSAGE, Drawing, check_world_size


def processes(world_size: int = 4, device: str = "GPU") -> Figure:
    """Draw one script and the processes that run it, each with its rank, its device and its memory.

    Args:
        world_size: From 2 to 4.
        device: What the diagram calls the device of each rank.
    """
    check_world_size(world_size)
    drawing = Drawing(8.8, 5.15, f"One script, {world_size} processes: each has a rank, a device and memory of its own")
    width, gap = 1.6, 0.42
    left = (drawing.width_in - world_size * width - (world_size - 1) * gap) / 2
    middle = drawing.width_in / 2
    drawing.box(middle - 1.3, 0.55, 2.6, 0.78, facecolor="white", edgecolor="black")
    drawing.code(middle - 1.15, 0.94, "rank = dist.get_rank()\nx = 10 * rank", ha="left", linespacing=1.6)
    drawing.text(middle - 1.42, 0.94, "the script", ha="right")
    outline = {"facecolor": "none", "linestyle": "--", "linewidth": 1.4, "edgecolor": "black"}
    group_y, process_y, messages_y = 1.72, 2.0, 4.12
    group_in = max(5.6, drawing.width_in - 2 * left + 0.4)
    drawing.box(middle - group_in / 2, group_y, group_in, 3.25, **outline)
    for rank in range(world_size):
        x = left + rank * (width + gap)
        drawing.arrow((middle + (rank - (world_size - 1) / 2) * 0.35, 1.36), (x + width / 2, process_y - 0.06))
        drawing.box(x, process_y, width, 1.85)
        drawing.rank_label(x, process_y, rank, width)
        drawing.text(x + width / 2, process_y + 0.54, f"process on {device} {rank}", "note")
        drawing.box(x + 0.15, process_y + 0.74, width - 0.3, 0.96, facecolor="white")
        drawing.text(x + width / 2, process_y + 0.91, "memory", "note")
        drawing.code(x + 0.45, process_y + 1.31, "x =")
        drawing.cell(x + 0.7, process_y + 1.12, f"{10 * rank}", (rank,))
        drawing.message((x + width / 2, process_y + 1.88), (x + width / 2, messages_y), arrowstyle="<|-|>")
    drawing.collective(left, messages_y, drawing.width_in - 2 * left, "messages", height=0.28)
    drawing.text(middle, 4.62, f"process group: {world_size} ranks that can send each other messages", weight="bold")
    drawing.text(middle, 4.84, "They share no memory, so a message is the only way from one rank to another.", "note")
    return drawing.finish()


def data_parallelism(world_size: int = 4) -> Figure:
    """Draw data parallelism: replicate the parameters once; in each step, slice the batch and average the gradients.

    The model has one parameter w, and its gradient on rank r is 2r + 1, so the average is the number of ranks.

    Args:
        world_size: From 2 to 4.
    """
    check_world_size(world_size)
    drawing = Drawing(8.8, 6.75, f"Replicate, slice, average: data parallelism on {world_size} ranks")
    left, cell_in = 2.5, (1.0, CELL_IN[1])
    column = (drawing.width_in - left - 0.15) / world_size
    everyone = tuple(range(world_size))
    samples = f"0 to {2 * world_size - 1}"
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
        drawing.cell(cell_x, 4.95, f"mean {world_size}", everyone, cell_in)
        drawing.arrow((middle, 5.37), (middle, 5.71))
        drawing.cell(cell_x, 5.75, f"w = {2 - 0.1 * world_size:.1f}", everyone, cell_in)
    across = drawing.width_in - left - 0.25
    drawing.collective(left + 0.05, 1.0, across, "broadcast from rank 0")
    terms = " + ".join(f"{2 * rank + 1}" for rank in everyone)
    drawing.collective(left + 0.05, 4.35, across, f"all-reduce, then division: ({terms}) / {world_size} = {world_size}")
    return drawing.finish()
