"""The report of every benchmark: the machine, and a table of measured quantities with their targets."""

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path


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
