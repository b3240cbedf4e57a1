"""Templates of HTML: what is filled in stays text, and a mistake in a name is not silently left blank."""

from pathlib import Path

import jinja2
import pytest

from shared.tables import Table
from shared.tables.rendering import render

ROOT = Path(__file__).parent.parent


def test_values_are_text_whatever_they_look_like():
    shown = Table(["<i>"], [["<script>alert('1')</script>"]], "1 < 2\nand on")._repr_html_()
    assert "<th style='text-align:left;white-space:nowrap'>&lt;i&gt;</th>" in shown
    assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;" in shown
    assert shown.endswith("</table><div>1 &lt; 2</div><div>and on</div>")


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'table' is undefined"):
        render("shared.tables", "table.html")


def test_all_html_is_in_templates():
    """In HTML that code puts together by hand, it is easy to forget to escape a value."""
    found = [path for name in ("shared", "instructor") for path in (ROOT / name).rglob("*.py")]
    by_hand = [
        path.name for path in found if any(f"</{tag}>" in path.read_text() for tag in ("td", "div", "span", "b"))
    ]
    assert len(found) > 100 and by_hand == []
