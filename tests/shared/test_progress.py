"""A student's progress: which runs are recorded, how an unreadable file is handled, and what the start page shows."""

import importlib
import json
import multiprocessing
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from instructor import build, contents
from shared import progress
from shared.checks import first_collectives
from shared.checks.engine import cells, display
from shared.checks.engine.verdicts import Verdict
from shared.deadlines import scaled
from shared.progress.page import Page, labs
from shared.ranks import reader

NAMES = ("sum_over_ranks", "global_mean", "pass_right", "log_mean_loss", "broadcast_by_hand")  # the last: a stretch
CHAPTERS = [chapter.name for chapter in build.chapters()]


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A folder with labs 00 and 01, of which 00 is open in JupyterLab."""
    for name in CHAPTERS[:2]:
        for folder in ("labs", "chapters"):
            (tmp_path / folder).mkdir(exist_ok=True)
            shutil.copy(build.ROOT / contents.notebook(folder, name), tmp_path / folder)
    monkeypatch.setattr(progress, "ROOT", tmp_path)
    monkeypatch.setattr(progress, "FILE", tmp_path / "progress.jsonl")
    monkeypatch.setattr(reader, "present", lambda: True)
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "labs" / "00_ranks_lab.ipynb"))
    return tmp_path


def check(name: str, failed: tuple[str, ...] = ()) -> None:
    """Record a run of one of lab 00's exercises that has the checks `values` and `wire`."""
    verdicts = [Verdict(name, check_name, check_name not in failed) for check_name in ("values", "wire")]
    progress.record(getattr(first_collectives, name), verdicts)


def page() -> Page:
    return Page(progress.ROOT, *progress.runs())


def run(exercise: str, passed: bool = True, at: str = "2026-01-02T10:00:00+00:00") -> progress.Run:
    return progress.Run(at, exercise, ("values",) if passed else (), () if passed else ("values",))


# -- recording


def test_a_run_in_a_lab_is_recorded_with_its_checks_and_its_time(course):
    check("sum_over_ranks", failed=("wire",))
    check("sum_over_ranks")
    first, second = progress.runs()[0]
    assert (first.exercise, first.passed, first.failed) == ("first_collectives.sum_over_ranks", ("values",), ("wire",))
    assert (second.passed, second.failed) == (("values", "wire"), ())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", first.at)
    assert "never used for grading" in (course / "progress.jsonl").read_text()


@pytest.mark.parametrize(
    "notebook", ["solutions/00_ranks_solution.ipynb", "00_ranks.ipynb", "labs/mine/00_ranks_lab.ipynb", ""]
)
def test_a_run_anywhere_else_is_not_recorded(course, monkeypatch, notebook):
    monkeypatch.setenv("JPY_SESSION_NAME", str(course / notebook) if notebook else "")
    check("sum_over_ranks")
    assert progress.runs() == ([], "") and not (course / "progress.jsonl").exists()


def test_a_run_by_a_program_that_executes_the_lab_is_not_recorded(course, monkeypatch):
    check("sum_over_ranks")
    before = (course / "progress.jsonl").read_bytes()
    monkeypatch.setattr(reader, "present", lambda: False)
    check("global_mean")
    assert (course / "progress.jsonl").read_bytes() == before


def test_exercises_are_recorded_by_the_names_that_the_labs_use():
    found, unreadable = labs(build.ROOT)
    assert [lab.file for lab in found] == [f"{name}_lab.ipynb" for name in CHAPTERS] and not unreadable
    for lab in found:
        notebook = nbformat.read(build.ROOT / "labs" / lab.file, as_version=4)
        marks = [cell.metadata["nbgrader"] for cell in notebook.cells if "nbgrader" in cell.metadata]
        assert [mark["points"] for mark in marks if mark["grade"]] == [exercise.points for exercise in lab.exercises]
        for exercise in lab.exercises:
            module, name = exercise.key.split(".")
            check_object = getattr(importlib.import_module(f"shared.checks.{module}"), name)
            assert progress.name_of(check_object) == exercise.key
    assert [exercise.name for lab in found[:2] for exercise in lab.exercises if exercise.stretch] == [
        "broadcast_by_hand",
        "direct_reduce_scatter",
    ]


def add_runs(file: Path, exercise: str, count: int, barrier) -> None:
    progress.FILE = file
    barrier.wait()
    for _ in range(count):
        progress._append(run(exercise))


def test_notebooks_that_write_at_the_same_time_lose_nothing(course):
    context, names = multiprocessing.get_context("fork"), [f"lab.{number}" for number in range(4)]
    barrier = context.Barrier(len(names))
    writers = [context.Process(target=add_runs, args=(progress.FILE, name, 200, barrier)) for name in names]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(scaled(60))
    found, problem = progress.runs()
    assert problem == "" and all([run.exercise for run in found].count(name) == 200 for name in names)


# -- unreadable files

FOREIGN = {
    "cut short": b'\n{"at": "2026-01-01T00:00:0',
    "not text": bytes(range(256)),
    "not ours": b'{"at": 1, "exercise": [], "passed": ["a"], "failed": []}\n[]\n7\nnull\n{"passed": 3}',
    "deep": b"[" * 100_000,
    "says nothing": b'{"at": "", "exercise": "first_collectives.pass_right", "passed": [], "failed": []}',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_unreadable_lines_are_reported_once_and_do_not_affect_the_others(course, capsys, content):
    check("sum_over_ranks")
    with (course / "progress.jsonl").open("ab") as file:
        file.write(b"\n" + content)
    check("global_mean")
    assert [run.exercise.split(".")[1] for run in progress.runs()[0]] == ["sum_over_ranks", "global_mean"]
    progress.show()
    assert capsys.readouterr().out.count("cannot be read") == 1


@pytest.mark.parametrize("kind", ["a folder", "nowhere", "too large"])
def test_a_file_that_cannot_be_used_affects_neither_checks_nor_the_page(course, monkeypatch, capsys, kind):
    if kind == "a folder":
        progress.FILE.mkdir()
    elif kind == "nowhere":
        monkeypatch.setattr(progress, "FILE", course / "labs" / "00_ranks_lab.ipynb" / "progress.jsonl")
    else:
        monkeypatch.setattr(progress, "MAX_BYTES", 10)
        progress.FILE.write_text("a record of something else")
    check("sum_over_ranks")
    printed = capsys.readouterr().out
    assert printed.count("\n") == (kind != "too large") and ("cannot be written" in printed) == (kind != "too large")
    progress.show()
    shown = capsys.readouterr().out
    assert shown.startswith("Next: read chapters/00_ranks.ipynb, then do labs/00_ranks_lab.ipynb.")
    assert "progress.jsonl" in shown.splitlines()[1] or kind == "nowhere"


def test_a_full_disk_is_reported(course, monkeypatch, capsys):
    monkeypatch.setattr(progress, "FILE", Path("/dev/full"))
    if not progress.FILE.exists():
        pytest.skip("there is no /dev/full here")
    check("sum_over_ranks")
    assert "cannot be written (No space left on device)" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"metadata": {"course": {"module": "x"}}, "cells": [7]}'])
def test_a_lab_that_cannot_be_read_is_named_and_the_others_are_shown(course, content):
    (course / "labs" / "01_collectives_lab.ipynb").write_text(content)
    (course / "labs" / "00_ranks_lab-Copy1.ipynb").write_text(content)  # It has no lesson.
    check("sum_over_ranks")
    shown = page().as_text()
    assert "These files in labs/ cannot be read as labs: 01_collectives_lab.ipynb." in shown
    assert "Lab 00" in shown and "Copy" not in shown


# -- the page


def test_an_exercise_passes_when_all_checks_pass_in_one_run_and_stays_passed(course):
    check("sum_over_ranks", failed=("wire",))
    check("sum_over_ranks", failed=("values",))
    assert "✗ sum_over_ranks" in page().as_text() and "0 of 5 exercises, 0 of 15 points" in page().as_text()
    check("sum_over_ranks")
    assert "✓ sum_over_ranks" in page().as_text() and "1 of 5 exercises, 2 of 15 points" in page().as_text()
    assert "last run" not in page().as_text()
    check("sum_over_ranks", failed=("wire",))
    shown = page().as_text()
    assert "✓ sum_over_ranks" in shown and "1 of 5 exercises, 2 of 15 points" in shown
    assert re.search(r"sum_over_ranks, last run on \S+ \(it first passed on \S+\): ✗ wire; ✓ values", shown)


def test_a_headline_tells_the_points_and_the_next_exercise_of_the_lab(course, monkeypatch):
    check("sum_over_ranks")
    after = progress.after(first_collectives.sum_over_ranks)
    following = labs(course)[0][0].exercises[1]
    assert (after.points, after.words) == ("2 of 15 points", f"next: {following.heading}")
    assert after.words.startswith("next: Exercise 0.2 · ") and not after.words.endswith(")")
    assert (str(after.link), after.link.cell_id) == ("labs/00_ranks_lab.ipynb", following.cell_id)
    for name in NAMES:
        check(name)
    after = progress.after(first_collectives.global_mean)
    assert (after.points, after.share, str(after.link)) == ("15 of 15 points", 1.0, "chapters/01_collectives.ipynb")
    assert after.words == "you have finished all exercises of this lab, next: lesson 01 · Collectives by hand"
    monkeypatch.setattr(reader, "present", lambda: False)
    assert progress.after(first_collectives.global_mean) is None


def test_a_success_is_a_bar_with_a_link_and_our_version_to_open(course):
    check("sum_over_ranks")
    verdicts = [Verdict("sum_over_ranks", "values", True, (1, 2))]
    after = progress.after(first_collectives.sum_over_ranks)
    html = display.success_as_html(verdicts, "✓ Exercise 0.1 passed", "", after, ("if a < b: ...",))
    assert Links(html).found == ["../labs/00_ranks_lab.ipynb#cell-id=lab-006"]
    assert "width:13%" in html and "Compare with ours" in html and "if a &lt; b: ..." in html


def test_looking_at_our_version_is_recorded_and_passes_nothing(course):
    for _ in range(3):
        check("sum_over_ranks", failed=("wire",))
    assert progress.failures_in_a_row(first_collectives.sum_over_ranks) == 3
    progress.record_look(first_collectives.sum_over_ranks)
    assert "✗ sum_over_ranks (saw ours)" in page().as_text() and "0 of 15 points" in page().as_text()
    check("sum_over_ranks")
    assert progress.failures_in_a_row(first_collectives.sum_over_ranks) == 0
    assert "✓ sum_over_ranks (saw ours)" in page().as_text()
    progress.record_look(first_collectives.global_mean)
    check("pass_right")
    progress.record_look(first_collectives.pass_right)
    shown = page()
    assert "✓ pass_right (saw ours)" not in shown.as_text() and not shown.notes


def test_what_one_mistake_causes_elsewhere_is_folded():
    failed = [Verdict("Bucket", name, False, (2,), f"{name} is wrong") for name in ("pack", "launch", "wait")]
    html = display.as_html([Verdict("Bucket", "made", True, (2,)), *failed], "✗")
    shown, _, folded = html.partition("<details>")
    assert "pack is wrong" in shown and "made" in shown and "2 more checks" in folded and "wait is wrong" in folded
    assert "<details>" not in display.as_html(failed[:2], "✗")
    skipped = [Verdict("Bucket", name, False, (), f"did not run: {name}") for name in ("first", "second")]
    shown, _, folded = display.as_html([*skipped, failed[0]], "✗").partition("<details>")
    assert "pack is wrong" in shown and "did not run: first" in folded  # what ran and failed is never folded alone


def test_a_check_that_did_not_run_has_a_sign_of_its_own():
    verdicts = [
        Verdict("Bucket", "pack", True, (1, 2)),
        Verdict("Bucket", "launch", False, (2,), "nothing was sent"),
        Verdict("Bucket", "wait", False, (), "this check did not run, because earlier checks failed"),
    ]
    lines = display.as_text(verdicts, "a headline").splitlines()
    assert [line[0] for line in lines if not line.startswith(" ")] == ["a", "✓", "✗", "–"]


@pytest.mark.parametrize(
    ("runs", "next_step"),
    [
        ([], "read chapters/00_ranks.ipynb, then do labs/00_ranks_lab.ipynb"),
        ([("00", NAMES[0], False)], "sum_over_ranks in labs/00_ranks_lab.ipynb"),
        ([("00", name, True) for name in NAMES[:2]], "pass_right in labs/00_ranks_lab.ipynb"),
        ([("00", NAMES[0], True), ("00", NAMES[0], False)], "global_mean in labs/00_ranks_lab.ipynb"),
        # a stretch exercise comes last
        ([("00", name, True) for name in NAMES[:4]], "read chapters/01_collectives.ipynb, then do labs/01_coll"),
        # a student who begins with another lab stays there, and returns to the first one later
        ([("01", "ring_step", True)], "ring_reduce_scatter in labs/01_collectives_lab.ipynb"),
        ([("01", None, True)], "read chapters/00_ranks.ipynb, then do labs/00_ranks_lab.ipynb"),
        (
            [*[("00", name, True) for name in NAMES[:4]], ("01", None, True)],
            "broadcast_by_hand in labs/00_ranks_lab.ipynb",
        ),
    ],
)
def test_the_next_step(course, runs, next_step):
    modules = {"00": "first_collectives", "01": "collectives"}
    all_keys = [exercise.key for exercise in labs(course)[0][1].exercises]
    found = []
    for lab, name, passed in runs:
        keys = [f"{modules[lab]}.{name}"] if name else all_keys
        found += [run(key, passed) for key in keys]
    assert Page(progress.ROOT, found).as_text().startswith(f"Next: {next_step}")


def test_the_page_when_all_exercises_have_passed_and_without_labs(course):
    found = [run(exercise.key) for lab in labs(course)[0] for exercise in lab.exercises]
    assert Page(progress.ROOT, found).as_text().startswith("You have passed every exercise in this folder.")
    shutil.rmtree(course / "labs")
    assert Page(progress.ROOT, found).as_text().startswith("There are no labs in this folder.")


def test_a_success_rewrites_the_bars_of_the_start_page(course):
    progress.write_bars()
    bar = course / "build" / "progress" / "00.svg"
    assert "0/15" in bar.read_text() and (bar.parent / "01.svg").exists()
    check("sum_over_ranks")
    assert "2/15" in bar.read_text() and 'width="6.0"' in bar.read_text()
    for name in NAMES:
        check(name)
    assert "15/15 ✓" in bar.read_text()


def test_the_page_to_keep_has_what_passed_when_and_after_which_help(course, capsys):
    check("global_mean", failed=("wire",))
    progress.finish()
    assert "nothing to show yet" in capsys.readouterr().out and not (course / "mine").exists()
    check("sum_over_ranks")
    progress.record_look(first_collectives.pass_right)
    check("pass_right")
    lab = course / "labs" / "00_ranks_lab.ipynb"
    notebook = json.loads(lab.read_text())
    cell = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    cell["outputs"] = [nbformat.v4.new_output("display_data", {"image/png": f"{name}\n"}) for name in ("one", "two")]
    lab.write_text(json.dumps(notebook))
    progress.finish()
    html = (course / "mine" / "finished.html").read_text()
    words, today = Links(html).words, progress.runs()[0][0].at[:10]
    assert words.count(today) == 3 and "sum_over_ranks" in words and "global_mean" not in words
    numbers = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html)
    assert numbers == [("exercises passed", "2 of 13"), ("points", "6 of 31"), ("runs of checks", "3"), ("days", "1")]
    assert "Lab 01" not in words and "these classes" not in words and "6 of 15 points" in words
    assert words.count("with our version shown") == 1
    assert html.count("<img") == 1 and "base64,two" in html and not re.search("https?:", html)


class Links(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.found, self.words = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.found.append(dict(attrs)["href"])

    def handle_data(self, data):
        self.words += data


def test_links_lead_to_existing_notebooks_and_cells(course):
    check("sum_over_ranks")
    links = Links(page().as_html()).found
    assert "../labs/00_ranks_lab.ipynb#cell-id=lab-006" in links  # the heading of exercise 0.2
    assert {"../chapters/01_collectives.ipynb", "../labs/01_collectives_lab.ipynb"} <= set(links)
    for link in links:
        path, _, cell_id = link.partition("#cell-id=")
        notebook = nbformat.read(course / "chapters" / path, as_version=4)
        assert not cell_id or cell_id in [cell.id for cell in notebook.cells]


def test_the_page_has_the_same_text_in_html_and_escapes_the_titles_of_notebooks(course):
    path = course / "labs" / "00_ranks_lab.ipynb"
    path.write_text(path.read_text().replace("Lab 00 · First", "Lab 00 · <script>"))
    check("sum_over_ranks")
    check("pass_right", failed=("values",))
    shown = page().as_html()
    assert "<script>" not in shown
    text = Links(shown).words
    for part in ("✓ sum_over_ranks", "✗ pass_right", "– global_mean", "✗ values; ✓ wire", "1 of 13 exercises", "tried"):
        assert part in text and part in page().as_text()


def test_the_built_start_page_is_that_of_a_newcomer():
    lesson = nbformat.read(build.ROOT / "chapters" / f"{CHAPTERS[0]}.ipynb", as_version=4)
    cell = next(cell for cell in lesson.cells if cell.cell_type == "code")
    data = cell.outputs[0].data
    newcomers = Page(progress.ROOT, [])
    assert (data["text/plain"], data["text/html"]) == (newcomers.as_text(), newcomers.as_html())


# -- a failed check offers the exercise's hints and its original cell, without widgets


def test_hints_and_original_cell_are_read_from_the_students_own_file(tmp_path, monkeypatch):
    lab = build.lab_of(build.chapters()[0])
    for cell in lab.cells:
        cell.source = cell.source.replace(build.STUB, "return tensor")
    nbformat.write(lab, tmp_path / "lab.ipynb")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "lab.ipynb"))
    found = cells.help_for("first_collectives.pass_right")
    assert len(found.hints) == 2 and all(hint.startswith("<details><summary>") for hint in found.hints)
    (original,) = found.originals
    assert original.startswith("%%ranks\ndef pass_right(") and build.STUB in original


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"cells": [], "metadata": {}})])
def test_without_a_lab_nothing_is_offered(tmp_path, monkeypatch, content):
    path = tmp_path / "other.ipynb"
    path.write_text(content)
    for known in (str(path), str(path) + "-missing", ""):
        monkeypatch.setenv("JPY_SESSION_NAME", known)
        assert cells.help_for("first_collectives.pass_right") == cells.Assistance()


def test_blocks_are_shown_below_the_verdicts_and_code_is_escaped():
    verdicts = [Verdict("pass_right", "values", False, (2,), "it is wrong")]
    offered = cells.Assistance(("<details><summary>Hint</summary>Think.</details>",), ("if a < b: ...",))
    html = display.as_html(verdicts, "✗", assistance=offered)
    assert html.index("</table>") < html.index("<summary>Hint</summary>") < html.index("Start over")
    assert "if a &lt; b: ..." in html
    assert "<details>" not in display.as_html(verdicts, "✗")


@pytest.mark.parametrize("chapter", build.chapters(), ids=lambda chapter: chapter.name)
def test_every_lab_stores_the_original_of_each_exercise(chapter):
    lab = build.lab_of(chapter)
    exercises = [cell for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    assert lab.metadata["course"]["originals"] == {cell.id: cell.source for cell in exercises}
    assert exercises and all(build.STUB in cell.source for cell in exercises)
