"""The diagram of a cluster: hosts of GPUs, the links between them, and a layout on top."""

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import MESSAGE, Drawing

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
