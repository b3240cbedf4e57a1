"""What the course's pages say: references, links, terms, the start page, spelling, and the notebooks of the site."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from benchmarks import stages
from instructor import build, contents, glossary, release, start_page
from instructor.contents import wrong_references
from instructor.glossary import GlossaryError, Term, terms_in
from instructor.links import GLOSSARY, TAG, line, with_links
from instructor.site import notebooks
from tests import links, spelling

ROOT = build.ROOT
CHAPTERS = build.chapters()
KINDS = ("chapters", "labs", "solutions")


def everything_exists(path: str) -> bool:
    return True


# -- references to chapters and exercises

FOLDERS = ("benchmarks", "docs", "instructor", "labs", "shared", "solutions", "source")
FOLDERS += ("tests/mutants", "tests/variants")
HEADING = re.compile(r"^# ## Exercise (\d+\.\d+) · ", re.MULTILINE)
EXERCISES = {chapter: HEADING.findall((chapter.folder / "lab.py").read_text()) for chapter in CHAPTERS}


def test_every_chapter_is_in_the_contents_with_its_number_name_and_title():
    planned = {chapter.folder: chapter.title for chapter in contents.CHAPTERS.values()}
    for chapter in CHAPTERS:
        title = re.search(r"^# # (\d\d) · (.+)$", (chapter.folder / "lesson.py").read_text(), re.MULTILINE)
        assert planned.get(chapter.name) == title[2] and title[1] == chapter.name[:2]


def test_exercises_are_numbered_by_their_chapter():
    for chapter, numbers in EXERCISES.items():
        assert numbers == [f"{int(chapter.name[:2])}.{index}" for index in range(1, len(numbers) + 1)]


def test_the_readme_has_the_chapters_of_the_contents():
    row = re.compile(r"^\| (\d\d) \| \[(.+?)]\(chapters/(\w+)\.ipynb\)", re.MULTILINE)
    rows = row.findall((ROOT / "README.md").read_text())
    assert [folder for _, _, folder in rows] == [chapter.name for chapter in CHAPTERS]
    planned = [contents.CHAPTERS[int(number)] for number, _, _ in rows]
    assert [(title, folder) for _, title, folder in rows] == [(chapter.title, chapter.folder) for chapter in planned]


def test_no_link_of_a_page_is_broken():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    pages = {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages}
    assert "START_HERE.md" in pages
    assert links.broken(pages, lambda target: (ROOT / target).exists()) == []


def test_every_reference_is_right():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    texts = [path for path in files if path.suffix in (".py", ".md", ".toml")]
    known = {number for numbers in EXERCISES.values() for number in numbers}
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *texts]:
        assert list(wrong_references(path.read_text(), known)) == [], path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("as in chapter 21", "there is no chapter 21"),
        ("as in chapter\n# 21", "there is no chapter 21"),
        ("(chapters 06 to 33)", "there is no chapter 33"),
        ("Lab 99's queue", "there is no chapter 99"),
        ("see chapter 7", "there is no chapter 7"),
        ("chapter 07 (zero2)", "chapter 07 is zero1"),
        ("Chapter 07 · ZeRO-2", "chapter 07 is 'ZeRO-1'"),
        ("exercises 7.1 and 7.9", "there is no exercise 7.9"),
        ("chapter 07 (zero1)", ""),
        ("chapter 07 · ZeRO-1", ""),
        ("Lab 00 · First collectives", ""),
        ("chapters 04, 19", ""),
        ("exercise 7.2", ""),
    ],
)
def test_a_wrong_reference_is_found_and_a_right_one_is_accepted(text, message):
    found = list(wrong_references(text, {"7.1", "7.2"}))
    assert len(found) == bool(message) and all(each.endswith(message) for each in found)


# -- links at the top and the bottom of notebooks


@pytest.mark.parametrize("folder", KINDS)
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_every_notebook_begins_and_ends_with_its_links(folder, chapter):
    notebook = nbformat.read(ROOT / contents.notebook(folder, chapter.name), as_version=4)
    first, *inner, last = notebook.cells
    assert first.source == last.source and TAG in first.metadata["tags"] and TAG in last.metadata["tags"]
    assert not [cell for cell in inner if TAG in cell.metadata.get("tags", [])]


@pytest.mark.parametrize(
    ("folder", "missing", "expected"),
    [
        (
            "chapters",
            (),
            "[← 00 · Ranks](00_ranks.ipynb) | [Lab](../labs/01_collectives_lab.ipynb) | "
            "[Solution](../solutions/01_collectives_solution.ipynb) | [Glossary](glossary.md) | "
            "[02 · Data parallelism by hand →](02_manual_ddp.ipynb)",
        ),
        (
            "labs",
            ("chapters/02_manual_ddp.ipynb", "solutions/01_collectives_solution.ipynb"),
            "[← 00 · Ranks](../chapters/00_ranks.ipynb) | [Lesson](../chapters/01_collectives.ipynb) | "
            "[Glossary](../chapters/glossary.md)",
        ),
        (
            "labs",
            ("chapters/00_ranks.ipynb", "chapters/02_manual_ddp.ipynb", "chapters/glossary.md"),
            "[Lesson](../chapters/01_collectives.ipynb) | [Solution](../solutions/01_collectives_solution.ipynb)",
        ),
    ],
)
def test_links_lead_to_what_exists(folder, missing, expected):
    three = {contents.notebook(kind, chapter.name) for kind in KINDS for chapter in CHAPTERS[:3]}
    present = {*three, GLOSSARY} - set(missing)
    assert line(folder, "01_collectives", present.__contains__) == expected


def test_a_notebook_with_other_links_keeps_its_outputs(monkeypatch, tmp_path):
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("6 * 7")]
    notebook = build._to_execute(nbformat.v4.new_notebook(cells=cells, metadata={"course": {}}))
    before = with_links(notebook, "chapters", "00_ranks", lambda path: path == "chapters/00_ranks.ipynb")
    after = with_links(notebook, "chapters", "00_ranks", everything_exists)

    def executed(content, folder):
        content.cells[2].outputs = [nbformat.v4.new_output("stream", text="42")]
        return content

    path = tmp_path / "00_ranks.ipynb"
    monkeypatch.setattr(build, "execute", executed)
    nbformat.write(build._with_outputs(before, path, force=False), path)

    monkeypatch.setattr(build, "execute", lambda content, folder: pytest.fail("was executed again"))
    assert not build.is_current(path, "executed", after)
    relinked = build._with_outputs(after, path, force=False)
    assert relinked.cells[2].outputs and relinked.cells[0].source == after.cells[0].source
    path.write_text(build.as_saved(relinked))
    assert build.is_current(path, "executed", after)


def test_links_are_replaced_and_not_added_twice():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 00 · Ranks")])
    once = with_links(notebook, "chapters", "00_ranks", everything_exists)
    twice = with_links(once, "chapters", "00_ranks", lambda path: path == "chapters/00_ranks.ipynb")
    assert len(notebook.cells) == 1 and len(once.cells) == len(twice.cells) == 3
    assert "Lab" in once.cells[0].source and twice.cells[0].source == ""


# -- the glossary has every term that a lesson introduces, once, with a link to that lesson

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
    of_sequences = "tokens without content that bring the sequences of a batch to the same length."
    assert terms_in(CELL, "02_manual_ddp") == [
        Term("rank", "", "one of the processes that run together.", "02_manual_ddp"),
        Term("padding", "of sequences", of_sequences, "02_manual_ddp"),
    ]
    assert terms_in("**rank**: not in a list\n\n- **ring**: below no heading", "00_ranks") == []
    two = lesson("02_manual_ddp", "**Terms**\n\n- **padding**: zeros.\n- **padding** (of sequences): tokens.\n")
    assert [term.kind for term in glossary.glossary([two])] == ["", "of sequences"]


@pytest.mark.parametrize("bullet", ["- **rank** one of the processes", "- rank: one of the processes", "- **rank**:"])
def test_a_bullet_that_is_no_definition_is_an_error(bullet):
    with pytest.raises(GlossaryError, match=r"00_ranks: the bullet .* should be `- \*\*term\*\*: definition`"):
        terms_in(f"**Terms**\n\n{bullet}\n", "00_ranks")


def test_the_glossary_is_sorted_and_links_to_the_lessons():
    page = glossary.page([lesson("00_ranks", terms("rank", "Gloo")), lesson("01_collectives", terms("gather"))])
    assert page == glossary.HEAD + (
        "\n- **gather**: a thing. ([01 · Collectives by hand](01_collectives.ipynb))"
        "\n- **Gloo**: a thing. ([00 · Ranks](00_ranks.ipynb))"
        "\n- **rank**: a thing. ([00 · Ranks](00_ranks.ipynb))\n"
    )


def test_a_term_that_is_defined_twice_is_an_error():
    two = lesson("00_ranks", terms("bandwidth", "rank")), lesson("01_collectives", terms("Bandwidth"))
    with pytest.raises(GlossaryError, match=r"^00_ranks and 01_collectives both define \*\*bandwidth\*\*$"):
        glossary.glossary(two)


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


def test_the_glossary_matches_the_lessons_and_that_of_a_bundle_its_chapters():
    assert glossary.PAGE.read_text() == glossary.page(CHAPTERS)
    assert release.bundle(1)["chapters/glossary.md"].decode() == glossary.page(CHAPTERS[:2])


# -- the start page maps the chapters that a reader has, and its numbers are those of the benchmarks


@pytest.fixture(scope="module")
def page() -> str:
    return start_page.page(CHAPTERS, exists=everything_exists)


def test_the_page_matches_the_chapters(page):
    assert start_page.PAGE.read_text() == page


def test_every_chapter_is_on_the_page_with_its_minutes_and_links(page):
    rows = [row for row in page.splitlines() if re.match(r"\| \d\d \| \[", row)]
    for row, chapter in zip(rows, [chapter for chapter in CHAPTERS if not chapter.is_draft], strict=True):
        assert [link.split("/")[0] for link in links.links(row)] == [*KINDS]
        assert all(contents.folder_of(Path(link)) == chapter.name for link in links.links(row))
        assert (
            f" | {start_page.lesson_minutes(chapter)} | " in row and f" | {start_page.lab_minutes(chapter)} | " in row
        )


def test_a_draft_is_still_to_come(page, monkeypatch):
    monkeypatch.setattr(build.Chapter, "is_draft", property(lambda chapter: chapter.name == "05_scaling"))
    drafted = start_page.page(CHAPTERS, exists=everything_exists)
    assert "05_scaling" in page and "05_scaling" not in drafted
    assert re.search(r"^\*\*Still to come:\*\* Scaling, ", drafted, re.MULTILINE)
    monkeypatch.setattr(build.Chapter, "is_draft", True)
    assert "chapters/00" not in start_page.page(CHAPTERS, exists=everything_exists)


def test_a_bundles_page_shows_only_what_is_in_the_bundle():
    files = release.bundle(1)
    page = files["START_HERE.md"].decode()
    assert links.broken({"START_HERE.md": page}, files.__contains__) == []
    assert "solutions/00_ranks_solution.ipynb" in page and "labs/01_collectives_lab.ipynb" in page
    assert "solutions/01_collectives_solution.ipynb" not in page and "02_manual_ddp" not in page
    assert re.search(r"^\*\*Still to come:\*\* Data parallelism by hand, ", page, re.MULTILINE)


def test_the_memory_on_the_page_is_what_the_formulas_predict(page):
    """tests/benchmarks/test_ladder.py compares these predictions with measurements."""
    shown = [int(number) for number in re.findall(r"█` (\d+) MB", page)]
    predicted = [stages.predicted(stage).held_mb for stage in range(4)]
    assert shown == [round(sum(held[part] for part in stages.STATE)) for held in predicted]
    assert f"{predicted[3]['gathered']:.0f} MB of parameters that it gathers" in page


def test_the_times_on_the_page_are_those_of_the_benchmark(page):
    ratios = start_page.step_ratios()
    assert re.findall(r"(\d\.\d\d) times as long", page) == [ratios["ManualDDP"], ratios["OverlappedDDP"]]
    assert float(ratios["OverlappedDDP"]) < float(ratios["ManualDDP"])


def test_the_command_writes_the_page_only_when_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(start_page, "PAGE", tmp_path / "START_HERE.md")
    monkeypatch.setattr("sys.argv", ["start_page", "--check"])
    assert start_page.main() == 1 and not start_page.PAGE.exists()
    monkeypatch.setattr("sys.argv", ["start_page"])
    assert start_page.main() == 0 and start_page.PAGE.exists()
    monkeypatch.setattr("sys.argv", ["start_page", "--check"])
    assert start_page.main() == 0


# -- the spelling of prose, and not of code, formulas and names

PLANTED = ["recieve", "shrad", "gradeint", "teh", "occured", "bukcet", "synchronzie"]


def misspelled(path: Path, known=()) -> list[str]:
    """Return `line: word` for each word that is found."""
    return [found.removeprefix(f"{path}:").split(" (")[0] for found in spelling.misspelled([path], known)]


@pytest.mark.parametrize(
    ("prose", "at"),
    [("# A {} here\n", 1), ('def f():\n    """Say {} twice."""\n', 2), ("raise ValueError('this {}, no other')\n", 1)],
    ids=["comment", "docstring", "message"],
)
def test_a_misspelling_is_found_in_python(tmp_path, prose, at):
    path = tmp_path / "lesson.py"
    path.write_text("".join(prose.format(word) for word in PLANTED))
    assert misspelled(path) == [f"{at + index * prose.count(chr(10))}: {word}" for index, word in enumerate(PLANTED)]


def test_a_misspelling_is_found_in_markdown_unless_the_word_is_known(tmp_path):
    path = tmp_path / "README.md"
    prose = "The **shrad** of `shrad`, $shrad$, shrad.py and shrad_bytes; half-shrad.\n"
    path.write_text(f"# Title\n\n```\nshrad\n```\n{prose}")
    assert misspelled(path) == ["6: shrad", "6: shrad"]
    assert misspelled(path, known=["shrad"]) == []


def test_code_is_not_prose(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("recieve = 'shrad'  # `gradeint` and fp32, DDP and x.shrad\n# %% shrad\n")
    assert misspelled(path) == []


def test_the_known_words_are_sorted_and_contain_no_mistake():
    own = spelling.WORDS.read_text().split()
    assert own == sorted(set(own)) and not set(own) & set(PLANTED)


def test_an_unknown_word_fails_the_command(monkeypatch, tmp_path, capsys):
    (tmp_path / "notes.md").write_text("A gradeint.")
    monkeypatch.setattr(spelling, "prose_files", lambda: [tmp_path / "notes.md"])
    assert spelling.main() == 1
    assert "notes.md:1: gradeint" in capsys.readouterr().out


# -- the site shows committed notebooks, and not what somebody has run or written in this copy of the course

OURS, MINE = '{"cells": []}\n', '{"cells": ["my own code"]}\n'
LAB = "labs/00_ranks_lab.ipynb"


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A repository with one committed lab."""
    (tmp_path / "labs").mkdir()
    (tmp_path / LAB).write_text(OURS)
    author = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    for arguments in (("init", "-q"), ("add", "-A"), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    return tmp_path


def test_the_site_shows_the_committed_notebook_and_a_new_one_before_it_is_committed(course):
    assert notebooks.changed(["labs/*.ipynb"]) == []
    (course / "labs" / "new.ipynb").write_text(OURS)
    assert notebooks.committed_text("labs/new.ipynb") == OURS
    (course / LAB).write_text(MINE)
    assert notebooks.committed_text(LAB) == OURS
    assert notebooks.changed(["labs/*.ipynb"]) == [LAB]


def test_without_git_the_site_shows_the_file(course, monkeypatch):
    (course / LAB).write_text(MINE)
    monkeypatch.setenv("PATH", "")
    assert notebooks.committed_text(LAB) == MINE and notebooks.changed([LAB]) == []
