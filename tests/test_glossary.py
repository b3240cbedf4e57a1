"""The glossary has every term that a lesson introduces, once, with a link to that lesson."""

from types import SimpleNamespace

import nbformat
import pytest

from instructor import build, glossary, release
from instructor.glossary import GlossaryError, Term, terms_in

CELL = """## Recap

| a | table |
|---|---|

**Terms**

- **rank**: one of the processes that run together.
- **padding** (of sequences): tokens without content that bring the sequences of a batch
  to the same length.

- not a term, because it is below the list
"""


def lesson(name: str, source: str):
    """Return an object that reads like a chapter whose lesson has one cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(source)])
    return SimpleNamespace(name=name, read={"lesson": notebook}.__getitem__)


def terms(*names: str) -> str:
    return "\n".join(["**Terms**", "", *(f"- **{name}**: a thing." for name in names)])


def test_terms_are_read_with_what_tells_them_apart():
    assert terms_in(CELL, "02_manual_ddp") == [
        Term("rank", "", "one of the processes that run together.", "02_manual_ddp"),
        Term(
            "padding",
            "of sequences",
            "tokens without content that bring the sequences of a batch to the same length.",
            "02_manual_ddp",
        ),
    ]


def test_a_cell_without_the_list_has_no_terms():
    assert terms_in("**rank**: not in a list\n\n- **ring**: below no heading", "00_ranks") == []


@pytest.mark.parametrize("bullet", ["- **rank** one of the processes", "- rank: one of the processes", "- **rank**:"])
def test_a_bullet_that_is_no_definition_is_an_error(bullet):
    with pytest.raises(GlossaryError, match=r"00_ranks: the bullet .* should be `- \*\*term\*\*: definition`"):
        terms_in(f"**Terms**\n\n{bullet}\n", "00_ranks")


def test_the_page_is_sorted_and_links_to_the_lessons():
    page = glossary.page([lesson("00_ranks", terms("rank", "Gloo")), lesson("01_collectives", terms("gather"))])
    assert page == glossary.HEAD + (
        "\n- **gather**: a thing. ([01 · Collectives by hand](01_collectives.ipynb))"
        "\n- **Gloo**: a thing. ([00 · Ranks](00_ranks.ipynb))"
        "\n- **rank**: a thing. ([00 · Ranks](00_ranks.ipynb))\n"
    )


def test_a_term_that_is_defined_twice_is_an_error():
    with pytest.raises(GlossaryError, match=r"^00_ranks and 01_collectives both define \*\*bandwidth\*\*$"):
        glossary.glossary(
            [lesson("00_ranks", terms("bandwidth", "rank")), lesson("01_collectives", terms("Bandwidth"))]
        )


def test_words_in_parentheses_tell_terms_apart():
    two = lesson("02_manual_ddp", "**Terms**\n\n- **padding**: zeros.\n- **padding** (of sequences): tokens.\n")
    assert [term.kind for term in glossary.glossary([two])] == ["", "of sequences"]


def test_the_command_complains_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(glossary, "PAGE", tmp_path / "glossary.md")
    monkeypatch.setattr(glossary, "chapters", lambda: [lesson("00_ranks", terms("rank", "rank"))])
    monkeypatch.setattr("sys.argv", ["glossary"])
    assert glossary.main() == 1 and not glossary.PAGE.exists()
    assert "00_ranks and 00_ranks both define **rank**" in capsys.readouterr().err
    monkeypatch.setattr(glossary, "chapters", lambda: [lesson("00_ranks", terms("rank"))])
    assert glossary.main() == 0 and "- **rank**: a thing." in glossary.PAGE.read_text()
    monkeypatch.setattr("sys.argv", ["glossary", "--check"])
    assert glossary.main() == 0
    monkeypatch.setattr(glossary, "chapters", lambda: [lesson("00_ranks", terms("ring"))])
    assert glossary.main() == 1 and "- **ring**" not in glossary.PAGE.read_text()


def test_the_glossary_matches_the_lessons():
    assert glossary.PAGE.read_text() == glossary.page(build.chapters())


def test_a_bundle_has_the_terms_of_its_chapters_only():
    page = release.bundle(1)["chapters/glossary.md"].decode()
    assert page == glossary.page(build.chapters()[:2])
