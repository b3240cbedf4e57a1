"""A small table that looks right in a notebook and as plain text."""

import html
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, notes below. As the last value of a cell it shows itself."""

    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, *self.note.splitlines()])

    def _repr_html_(self) -> str:
        style = "style='text-align:left;white-space:nowrap'"
        head = "".join(f"<th {style}>{html.escape(name)}</th>" for name in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td {style}>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        notes = "".join(f"<div>{html.escape(line)}</div>" for line in self.note.splitlines())
        return f"<table><tr>{head}</tr>{body}</table>{notes}"

    def _repr_pretty_(self, printer, _cycle) -> None:
        printer.text(str(self))
