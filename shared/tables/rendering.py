"""Renders HTML templates. Each one is in the `templates` folder of the package that uses it."""

import functools
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
