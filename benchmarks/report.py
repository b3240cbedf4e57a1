"""The report of every benchmark: the machine, and a table of measured quantities with their targets.

Also the figure of the GPU benchmark, a pure function of the rows of its report.
"""

import contextlib
import io
import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from shared import ranks


@contextlib.contextmanager
def started(world_size: int, **options):
    """Start ranks that print nothing and do not compare their calls, and stop them at the end.

    Args:
        options: Those of `ranks.start`, such as link.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(world_size, detect_mismatch=False, **options)
    try:
        yield
    finally:
        ranks.stop()


@dataclass(frozen=True)
class Row:
    """One quantity, measured several times."""

    what: str
    unit: str
    values: list[float]
    target: float | None = None  # the most that the median may be

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.median <= self.target


def machine() -> dict[str, object]:
    """Describe the machine that a benchmark runs on."""
    import torch

    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # a load above 0 at the start: other programs slow us down
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def as_table(rows: list[Row]) -> str:
    cells = [("", "min", "median", "max", "unit", "target", "met")]
    for row in rows:
        statistics_text = [f"{value:.2f}" for value in (min(row.values), row.median, max(row.values))]
        target, met = ("", "") if row.target is None else (f"≤ {row.target:g}", "yes" if row.met else "NO")
        cells.append((row.what, *statistics_text, row.unit, target, met))
    widths = [max(len(line[column]) for line in cells) for column in range(7)]
    justify = (str.ljust, str.rjust, str.rjust, str.rjust, str.ljust, str.ljust, str.ljust)
    return "\n".join(
        "  ".join(fit(cell, width) for fit, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in cells
    )


def put_between(path: Path, name: str, text: str) -> None:
    """Replace the text of a file between <!-- name --> and <!-- /name -->.

    Raises:
        ValueError: If the file does not contain both markers.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not begin or not end:
        raise ValueError(f"{path.name} must contain the markers <!-- {name} --> and <!-- /{name} -->")
    path.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")


def as_json(machine_info: dict[str, object], rows: list[Row]) -> str:
    as_dicts = [asdict(row) | {"median": row.median, "met": row.met} for row in rows]
    return json.dumps({"machine": machine_info, "rows": as_dicts}, indent=1)


def show(machine_info: dict[str, object], rows: list[Row], in_json: bool) -> int:
    """Print a report. Returns the exit code, which is 0 if every target was met."""
    if in_json:
        print(as_json(machine_info, rows))
    else:
        print("  ".join(f"{name} {value}" for name, value in machine_info.items()))
        print(as_table(rows))
    return 0 if all(row.met is not False for row in rows) else 1


GPU_ROW_IN = 0.42  # the height of a row in the figure of the GPU benchmark


def draw_gpu_rows(times, sizes, rows: list[dict]) -> None:
    """Draw time relative to plain training, and memory beside the formula, one row per strategy and number of ranks.

    Args:
        times: The axes for the times.
        sizes: The axes for the memory, which share their vertical axis with the times.
        rows: A `benchmarks.gpu.Row` each, as a dict.
    """
    from shared.plots import COLORS, HATCHES  # Ranks import this module, and draw nothing.

    positions = range(len(rows))
    edge = {"edgecolor": "black", "linewidth": 0.6}
    drawn = times.barh(positions, [row["over_plain"] for row in rows], facecolor=COLORS[5], **edge)
    times.bar_label(drawn, [f"{row['over_plain']:.2f}" for row in rows], padding=3, size=8)
    times.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    times.set_yticks(positions, [f"{row['strategy']}, {_ranks(row['ranks'])}" for row in rows])
    style = {"height": 0.36, **edge}
    held = [row["held_gb"] for row in rows]
    sizes.barh([y - 0.2 for y in positions], held, facecolor=COLORS[1], label="held", **style)
    formula = {"facecolor": COLORS[2], "hatch": HATCHES[1], "label": "formula"}
    sizes.barh([y + 0.2 for y in positions], [row["formula_gb"] for row in rows], **formula, **style)
    peaks = [row["peak_gb"] for row in rows]
    sizes.plot(peaks, positions, "k|", markersize=12, label="allocator's peak")
    times.set(xlabel="× plain training", title="time per step")
    sizes.set(xlabel="GB", title="memory before the step")
    for axes in (times, sizes):
        axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    times.set_ylim(len(rows) - 0.4, -0.6)


def _ranks(count: int) -> str:
    return f"{count} rank" + ("s" if count != 1 else "")
