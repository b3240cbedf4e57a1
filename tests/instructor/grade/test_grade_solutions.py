"""Right solutions get every point in the sandbox, without a void exercise or a notice.

Our own lab with optimizers is judged completely, and of each lab one exercise of somebody else's right solution.
test_grade.py has lab 00. test_mutants.py runs the checks on all right solutions, which takes less time than a sandbox.
"""

import functools
import zlib
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from instructor.build import module_names
from instructor.grade import course, grading, judge, static_checks
from instructor.grade.limits import Limits
from instructor.grade.tasks import module_of
from tests.handed_in import CHAPTERS, cells_of, hand_in, need_sandbox, pieces_of, writes

pytestmark = pytest.mark.slow

OWN = "07_zero1"
READY_MADE = tuple(static_checks.READY_MADE)
IN_ANOTHER_TEST = ("00_ranks", "02_manual_ddp")  # test_grade_unusual.py judges exercises that are written differently
RELEASED = [name for name, chapter in CHAPTERS.items() if not chapter.is_draft]


@pytest.mark.exhaustive
def test_our_own_solution_gets_every_point(tmp_path):
    need_sandbox()
    with course.unpacked(CHAPTERS[OWN]) as judged_with:
        record = grading.grade(hand_in(tmp_path, "anna", OWN), judged_with, Limits())
    assert record.why == "all checks passed"
    assert record.points == record.max_points == sum(task.points for task in judged_with.tasks) > 0
    assert record.notices == record.notes == []
    assert all(answer.verdicts for answer in record.answers)


@functools.cache
def of_other_authors() -> list[tuple[str, Path]]:
    """Return one right solution of each lab that is written differently.

    Those that import our own code of their lab are left out. No student has it.
    """
    found = []
    for lab in RELEASED:
        ours = tuple(f"solutions.{module}" for module in module_names(CHAPTERS[lab]))
        for path in sorted((Path(__file__).parents[2] / "variants" / lab).glob("*.py")):
            if not static_checks.forbidden(path.read_text(), ours, READY_MADE):
                found.append((lab, path))
                break
    return found


JUDGED = [(lab, path) for lab, path in of_other_authors() if lab not in IN_ANOTHER_TEST]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("lab", "path"), JUDGED, ids=lambda each: getattr(each, "stem", each))
def test_an_exercise_written_differently_gets_every_point(tmp_path, lab, path):
    """All of the solution is in the last exercise's cell, because the lab's own code would replace parts of it."""
    need_sandbox()
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        names = {name.replace("-", "_"): "pass" for name in unpacked.ours}
        submission = hand_in(tmp_path, "anna", lab, writes(**names | {[*names][-1]: path.read_text()}))
        pieces = {
            getattr(import_module(f"shared.checks.{module_of(CHAPTERS[lab])}"), t.name).piece: t for t in unpacked.tasks
        }
        defined = [task for piece, task in pieces.items() if piece in static_checks.lends(path.read_text())]
        drawn = defined[zlib.crc32(lab.encode()) % len(defined)]
        record = grading.grade(submission, replace(unpacked, tasks=(drawn,)), Limits())
    assert record.why == "all checks passed"
    assert record.points == record.max_points > 0 and record.answers[0].verdicts and not record.notes


@pytest.mark.parametrize(("lab", "path"), of_other_authors(), ids=lambda each: getattr(each, "stem", each))
def test_a_right_solution_written_differently_is_not_rejected(lab, path):
    assert static_checks.forbidden(path.read_text(), (), course.ready_made_in(CHAPTERS[lab])) == []


def test_no_solution_uses_anything_forbidden_or_noticed(tmp_path):
    for name in CHAPTERS:
        withheld = WITHHELD[list(CHAPTERS).index(name) :]
        pieces = pieces_of(hand_in(tmp_path, "anna", name))
        own = [piece["source"] for piece in pieces if piece["grade_id"]]
        ready_made = course.ready_made_in(CHAPTERS[name])
        assert [static_checks.forbidden(source, withheld, ready_made) for source in own] == [[]] * len(own)
        given = "\n\n".join(piece["source"] for piece in pieces if not piece["grade_id"])
        assert not [notice for source in own for notice in static_checks.notices(source, given)]


WITHHELD = tuple(f"solutions.{module}" for chapter in CHAPTERS.values() for module in module_names(chapter))


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("from solutions.zero1 import ZeRO1", "line 1 uses solutions.zero1"),
        ("\nfrom solutions import zero1", "line 2 uses solutions.zero1"),
        ("import shared.checks.zero1 as check", "line 1 uses shared.checks"),
        ("import importlib\nimportlib.import_module('instructor.grade.judge')", "line 2 uses instructor"),
        ("from shared import checks", "line 1 uses shared.checks"),
        ("def f():\n    from labs.simple_ddp import by_hand", "line 2 uses labs"),
        ("from shared.data import published_schedules", "line 1 uses shared.data.published_schedules"),
        ("from torch.distributed._composable.replicate import x", "line 1 uses torch.distributed._composable"),
        ("from torch.nn.parallel import DistributedDataParallel as D", "line 1 uses DistributedDataParallel"),
    ],
)
def test_forbidden_uses_are_named(source, use):
    assert use in static_checks.forbidden(source, WITHHELD)


def test_a_rejection_says_what_each_forbidden_name_is():
    """It once listed everything that is forbidden, and not what had been found."""
    source = "from labs import x\nfrom solutions.zero1 import ZeRO1\nfully_shard\nfully_shard"
    assert static_checks.forbidden(source, WITHHELD)[-1:] == ["line 3 uses fully_shard"]
    assert static_checks.why_forbidden(source, WITHHELD) == (
        "labs contains scripts that show parts of solutions. solutions.zero1 is a solution that you do not have yet. "
        "fully_shard is ready-made code for what this lab asks you to write."
    )


@pytest.mark.parametrize(
    ("source", "notice"),
    [
        ("import gc", "line 1 uses gc"),
        ("import sys\nframe = sys._getframe(1)", "line 2 uses _getframe"),
        ("import torch\ntorch.equal = print", "line 2 sets torch.equal"),
        ("dist.all_reduce = None", "line 1 sets dist.all_reduce"),
        ("import shared.wire as wire\nwire.x.y = 1", "line 2 sets wire.x.y"),
    ],
)
def test_uses_that_a_person_should_look_at_are_named(source, notice):
    assert notice in static_checks.notices(source)


def test_plain_code_is_neither_forbidden_nor_noticed():
    source = "import torch\nfrom solutions.models import x\nself.queue.kind = 'solutions.zero1x'\ntensor.grad = None"
    assert static_checks.forbidden(source, WITHHELD) == [] == static_checks.notices(source)


def test_no_script_that_shows_a_part_of_an_exercise_is_in_the_sandbox():
    with course.unpacked(CHAPTERS["02_manual_ddp"]) as judged_with:
        assert (judged_with.folder / "labs" / "02_manual_ddp_lab.ipynb").exists()
        assert not list((judged_with.folder / "labs").glob("*.py"))


def test_what_is_wrong_before_a_cell_runs_is_placed_in_the_students_cell():
    """Pages number the lines of a cell from its magics on. Once, the reasons did not, and named no exercise."""
    sources = ["def f(:", "import shared.checks", "import gc"]
    cells = [
        {"cell": f"cell-{i}", "grade_id": f"cell-{i}", "place": f"exercise 0.{i}", "source": source, "line": 3}
        for i, source in enumerate(sources)
    ]
    said: dict = {}
    job = {"module": "first_collectives", "cells": cells, "others": [], "tasks": [], "blank": []}
    job |= {"forbidden": [], "ready_made": []}
    judging = judge.Judge(job, lambda **line: said.update(line), [], [], [judge.NOT_MEASURED])
    assert [cell["grade_id"] for cell in judging._screen()] == ["cell-2"]
    assert judging.left_out["cell-0"].startswith("the cell does not compile: exercise 0.0, line 3: SyntaxError: ")
    assert judging.left_out["cell-1"].startswith("rejected: exercise 0.1, line 3 uses shared.checks. ")
    assert said["notices"] == ["exercise 0.2, line 3 uses gc"]


def test_an_exercise_in_several_cells_is_named_as_students_know_it(tmp_path, monkeypatch):
    monkeypatch.setattr(grading.Grading, "answers", lambda self: {})
    submission = hand_in(tmp_path, "anna", "00_ranks")
    cells = cells_of(submission)
    monkeypatch.setattr(grading, "_read", lambda *_: [*cells, next(cell for cell in cells if cell["name"])])
    with course.unpacked(CHAPTERS["00_ranks"]) as judged_with:
        record = grading.grade(submission, judged_with, Limits())
    assert record.notes == ["Exercise 0.1 is in several cells, which were run one after the other."]
