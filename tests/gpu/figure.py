"""Draws the figure of a run: the result of every part, and the benchmark: `python -m tests.gpu.figure FOLDER`."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from benchmarks import report
from shared.plots import COLORS, finish
from tests.gpu.page import name_gpus
from tests.gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED, TIMED_OUT, Run

# Color, sign and color of the sign. The signs tell the outcomes apart in black and white.
STYLES = {
    PASSED: ("#d6ecf8", "✓", "black"),
    FAILED: (COLORS[1], "✗", "white"),
    TIMED_OUT: ("#5c2d00", "…", "white"),
    SKIPPED: ("#dddddd", "–", "black"),
    NOT_RUN: ("white", "", "black"),
}
PER_LINE = 16
CELL_IN = 0.3


def draw(run: Run) -> Figure:
    """Draw a square for each part, and below them the benchmark's times and memory, if there are any."""
    rows = [row for part in run.parts if part.benchmark for row in part.benchmark["rows"]]
    lines = [(step, run.of(step)[i : i + PER_LINE], i == 0) for step in run.title for i in _starts(run, step)]
    heights = [CELL_IN * (len(lines) + 2.6)] + ([1.0 + report.GPU_ROW_IN * len(rows)] if rows else [])
    figure = plt.figure(figsize=(10.0, sum(heights)), layout="constrained")
    parts_figure, *others = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_parts(parts_figure.subplots(), run, lines)
    for benchmark_figure in others:
        times, sizes = benchmark_figure.subplots(1, 2, sharey=True)
        report.draw_gpu_rows(times, sizes, rows)
        handles, names = sizes.get_legend_handles_labels()
        benchmark_figure.legend(handles, names, frameon=False, ncols=3, loc="outside lower right")
    return finish(figure)


def _starts(run: Run, step: str) -> range:
    return range(0, max(1, len(run.of(step))), PER_LINE)


def _draw_parts(axes, run: Run, lines: list) -> None:
    """Draw a line of squares per step, and another one where they do not fit."""
    for y, (step, parts, is_first) in enumerate(lines):
        for x, part in enumerate(parts):
            color, sign, ink = STYLES[part.outcome]
            axes.add_patch(
                Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, facecolor=color, edgecolor="black", linewidth=0.6)
            )
            axes.text(x + 0.5, y + 0.52, sign, color=ink, ha="center", va="center", size=9)
        if is_first:
            axes.text(-0.3, y + 0.5, step, ha="right", va="center", size=10)
            axes.text(PER_LINE + 0.3, y + 0.5, run.counts(step) or "not chosen", ha="left", va="center", size=9)
    axes.set(xlim=(0, PER_LINE), ylim=(len(lines), 0), aspect="equal")
    axes.axis("off")
    used = [outcome for outcome in STYLES if any(part.outcome == outcome for part in run.parts)]
    squares = [Patch(facecolor=STYLES[name][0], edgecolor="black", linewidth=0.6) for name in used]
    labels = [f"{name} ({STYLES[name][1]})" if STYLES[name][1] else name for name in used]
    axes.legend(squares, labels, frameon=False, ncols=len(used), loc="upper center", bbox_to_anchor=(0.5, 0.0))
    where = name_gpus(run.machine) or "a machine without a GPU"
    axes.set_title(f"{'A dry run' if run.dry else 'The parts of every step'} on {where}, {run.began}", size=11)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(Run.from_dict(json.loads((folder / "report.json").read_text()))).savefig(folder / "report.png", dpi=150)
