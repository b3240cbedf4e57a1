"""HTML templates escape their values, and an undefined name is an error."""

from pathlib import Path

import jinja2
import nbformat
import pytest

from shared.tables import Table, render

ROOT = Path(__file__).parent.parent


def test_values_are_escaped():
    shown = Table(["<i>"], [["<script>alert('1')</script>"]], "1 < 2\nand on")._repr_html_()
    assert "<th style='text-align:left;white-space:nowrap'>&lt;i&gt;</th>" in shown
    assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;" in shown
    assert shown.endswith("</table><div>1 &lt; 2</div><div>and on</div>")


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'table' is undefined"):
        render("shared.tables", "table.html")


def test_all_html_is_in_templates():
    """HTML that Python code builds by hand may lack escaping."""
    found = [path for name in ("shared", "instructor") for path in (ROOT / name).rglob("*.py")]
    by_hand = [
        path.name for path in found if any(f"</{tag}>" in path.read_text() for tag in ("td", "div", "span", "b"))
    ]
    assert len(found) > 100 and by_hand == []


def test_no_stored_output_is_empty():
    """The template of tables was once empty, and all tables were blank."""
    for path in [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]:
        cells = nbformat.read(path, as_version=4).cells
        shown = [output.data for cell in cells for output in cell.get("outputs", []) if "data" in output]
        assert all(data.get("text/html", "-").strip() for data in shown), path.name
