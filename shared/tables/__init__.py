"""A small table that displays well in a notebook and as plain text, objects that display as one, and HTML templates.

Each template is in the folder `templates` of the package that uses it.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def render(package: str | None, template: str, **values) -> str:
    """Render a template, such as `table.html` of `shared.tables`. Values are text, so HTML in them is escaped."""
    assert package, "a module that renders is never run as a script outside a package"
    return _environment().get_template(f"{package.replace('.', '/')}/templates/{template}").render(values)


@functools.cache
def _environment():
    import jinja2  # Ranks import this module but never render anything.

    return jinja2.Environment(loader=jinja2.FunctionLoader(_read), autoescape=True, undefined=jinja2.StrictUndefined)


def _read(name: str) -> str:
    """Read a template, and remove indentation and line breaks, which are there only for its authors."""
    return "".join(line.strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())


@dataclass(frozen=True)
class Table:
    """A header, rows of text, and notes below. As the last value of a cell, it displays itself.

    Attributes:
        wraps: Whether all cells wrap, for a table of sentences. Otherwise, only very long ones do.
    """

    header: list[str]
    rows: list[list[str]]
    note: str = ""
    wraps: bool = False

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, *self.note.splitlines()])

    def _repr_html_(self) -> str:
        return render(__package__, "table.html", table=self)

    def _repr_pretty_(self, printer, _cycle) -> None:
        printer.text(str(self))


class ShowsTable:
    """Displays an object as the table that its table() returns, in a notebook and as plain text.

    A `dataclass` needs repr=False, because IPython prefers a class's own __repr__ to an inherited _repr_pretty_.
    """

    def table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _repr_pretty_(self, printer, _cycle) -> None:
        printer.text(str(self))
