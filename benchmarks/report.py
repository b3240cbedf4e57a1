"""What every benchmark prints: the machine, and a table of measured quantities beside their aims."""

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
    aim: float | None = None  # the median is to be at most this

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        return None if self.aim is None else self.median <= self.aim


def machine() -> dict[str, object]:
    import torch

    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # above 0 before we begin: others slow us down
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def as_table(rows: list[Row]) -> str:
    cells = [("", "min", "median", "max", "unit", "aim", "met")]
    for row in rows:
        numbers = [f"{number:.2f}" for number in (min(row.values), row.median, max(row.values))]
        aim, met = ("", "") if row.aim is None else (f"≤ {row.aim:g}", "yes" if row.met else "NO")
        cells.append((row.what, *numbers, row.unit, aim, met))
    widths = [max(len(line[column]) for line in cells) for column in range(7)]
    justify = (str.ljust, str.rjust, str.rjust, str.rjust, str.ljust, str.ljust, str.ljust)
    return "\n".join(
        "  ".join(fit(cell, width) for fit, cell, width in zip(justify, line, widths, strict=True)).rstrip()
        for line in cells
    )


def put_between(path: Path, name: str, text: str) -> None:
    """Replace what stands in a file between <!-- name --> and <!-- /name -->.

    Raises: ValueError where the file has no such place.
    """
    before, begin, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not begin or not end:
        raise ValueError(f"{path.name} has no place between <!-- {name} --> and <!-- /{name} -->")
    path.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def as_json(found_on: dict[str, object], rows: list[Row]) -> str:
    found = [asdict(row) | {"median": row.median, "met": row.met} for row in rows]
    return json.dumps({"machine": found_on, "rows": found}, indent=1)


def show(found_on: dict[str, object], rows: list[Row], in_json: bool) -> int:
    """Print a report. → the exit code: 0 where every aim was met"""
    if in_json:
        print(as_json(found_on, rows))
    else:
        print("  ".join(f"{name} {value}" for name, value in found_on.items()))
        print(as_table(rows))
    return 0 if all(row.met is not False for row in rows) else 1
