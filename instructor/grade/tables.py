"""Read tables as platforms and people's programs write them, and write them for all of these.

Excel writes UTF-8, UTF-16 or, in its default format, the system's old encoding, and separates columns by semicolons or
tabs in many countries. A table is read however it was written, or rejected in one sentence that says how to save it.
"""

import codecs
import csv
import io
import re
from dataclasses import dataclass, field
from pathlib import Path

BYTE_ORDER_MARK = "\ufeff"
SPREADSHEETS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # how files of Excel, LibreOffice and Numbers begin
SEPARATORS = ",;\t"
FIRST_LINE = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)  # Excel reads and writes it.
QUOTED = re.compile(r'"[^"]*"')
# In western languages, letters that are not ASCII stand alone or in pairs. Otherwise, this is another old encoding.
NOT_WESTERN = re.compile(r"[^\W\d_a-zA-Z]{3,}")


class Unreadable(ValueError):
    """A table cannot be read; the message says how to save it."""


@dataclass
class Table:
    """A table with a header."""

    columns: list[str]
    rows: list[list]
    lines: list[int] = field(default_factory=list)  # on which each row ends, if it was read
    separator: str = ","
    marked: bool = False  # whether it begins with a byte order mark

    def by_column(self) -> list[dict[str, str]]:
        return [dict(zip(self.columns, row, strict=False)) for row in self.rows]

    def as_text(self) -> str:
        """Return the table as CSV with the same separator. It is to be encoded as UTF-8."""
        text = io.StringIO()
        csv.writer(text, delimiter=self.separator, lineterminator="\n").writerows([self.columns, *self.rows])
        return BYTE_ORDER_MARK * self.marked + text.getvalue()


def read(path: Path) -> Table:
    """Read a table.

    Raises:
        Unreadable: if it is no table, or its encoding is unknown.
        OSError: if the file cannot be opened.
    """
    text, is_utf8 = _decoded(path.read_bytes(), path.name)
    marked = text.startswith(BYTE_ORDER_MARK) or not is_utf8
    text = text.removeprefix(BYTE_ORDER_MARK)
    named = FIRST_LINE.match(text)
    text = text[named.end() :] if named else text
    header = QUOTED.sub("", text.lstrip().split("\n", 1)[0])
    separator = named[1] if named else max(SEPARATORS, key=header.count)
    reader, rows, lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator), [], []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise _unreadable(path.name, str(error)) from None
    columns = [column.strip() for column in rows[0]] if rows else []
    padded = [row + [""] * (len(columns) - len(row)) for row in rows[1:]]
    return Table(columns, padded, lines[1:], separator, marked)


def _decoded(data: bytes, name: str) -> tuple[str, bool]:
    """Return the text, and whether it was UTF-8."""
    if data.startswith(SPREADSHEETS):
        raise _unreadable(name, "it is a spreadsheet's own format")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace"), False
    if b"\0" in data[:2]:  # UTF-16 without a byte order mark; the first character is ASCII.
        return data.decode("utf-16-be" if data[:1] == b"\0" else "utf-16-le", errors="replace"), False
    try:
        return data.decode("utf-8"), True
    except UnicodeDecodeError:
        pass
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        text = "???"
    if NOT_WESTERN.search(text) or text == "???":
        raise _unreadable(name, "its encoding is unknown")
    return text, False


def _unreadable(name: str, why: str) -> Unreadable:
    return Unreadable(f"{name} cannot be read as a table ({why}): save it as “CSV UTF-8”, and run this again")
