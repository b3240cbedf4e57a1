"""The table of a cell that hung: a row per rank with its state, its last call, its line, and whom it waits for."""

from dataclasses import dataclass

LONGEST_LINE = 48


@dataclass(frozen=True)
class Row:
    """What one rank did when the cell was stopped."""

    rank: int
    state: str
    call: str
    line: str
    waits_for: tuple[int, ...] = ()


def rows(cell, waits_for: dict[int, list[int]]) -> list[Row]:
    """Return a row for every rank that is known.

    Args:
        cell: The `diagnosis.CellState`.
        waits_for: By rank, the ranks whose call it misses.
    """
    found = []
    for rank in sorted(set(cell.positions) | set(cell.deaths)):
        position = cell.positions.get(rank)
        call = position["call"] if position else None
        line = (position["line"] if position and position["busy"] else call and call["line"]) or "–"
        text = call["text"] if call else "none in this cell" if position else "unknown"
        found.append(Row(rank, _state(rank, position, cell), text, line, tuple(waits_for.get(rank, ()))))
    return found


def as_text(found: list[Row]) -> str:
    cells = [("rank", "state", "last call", "at")]
    cells += [(str(row.rank), row.state, row.call, _short(row.line)) for row in found]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def as_html(found: list[Row]) -> str:
    from shared.tables import render

    missed = {rank for row in found for rank in row.waits_for}
    return render("shared.ranks", "hang_table.html", rows=found, missed=missed, colors=_COLORS)


_COLORS = {"waiting": "#d4483b", "failed": "#d4483b", "died": "#d4483b", "not responding": "#d4483b"}


def _short(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def _state(rank: int, position: dict | None, cell) -> str:
    outcome = cell.outcomes.get(rank)
    if rank in cell.deaths:
        return "died"
    if rank not in cell.targets:
        return "not asked"
    if outcome is not None:
        return "failed" if outcome.error else "finished"
    if position is None:
        return "not responding"
    return "running" if position["waits"] == "no" else "waiting"
