"""Honest work gets every point: a lab's solution, judged in the sandbox, is neither void nor worth a second look.

Four labs are judged whole: optimizers, a piece that is not exported, the largest, and files; test_grade.py has lab 00.
What could make honest work void is looked for in every lab's right solutions in test_mutants.py, which costs less than
a sandbox.
"""

import pytest

from instructor.build import module_names
from instructor.grade import course, grading, screen
from instructor.grade.limits import Limits
from instructor.grade.submissions import pieces_of
from tests.handed_in import CHAPTERS, hand_in, need_sandbox

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lab", ["07_zero1", "09_zero3", "10_fsdp", "12_checkpoints"])
def test_our_own_solution_gets_every_point(tmp_path, lab):
    need_sandbox()
    with course.unpacked(CHAPTERS[lab]) as judged_with:
        record = grading.grade(hand_in(tmp_path, "anna", lab), judged_with, Limits())
    assert record.why == "all checks passed"
    assert record.points == record.max_points == sum(task.points for task in judged_with.tasks) > 0
    assert record.notices == record.notes == []
    assert all(answer.verdicts for answer in record.answers)


def test_no_lab_s_solution_has_what_is_refused_or_noticed(tmp_path):
    for name, chapter in CHAPTERS.items():
        withheld = WITHHELD[list(CHAPTERS).index(name) :]
        pieces = pieces_of(hand_in(tmp_path, "anna", name), chapter)
        own = [piece["source"] for piece in pieces if piece["grade_id"]]
        assert [screen.refusals(source, withheld) for source in own] == [[]] * len(own)
        given = "\n\n".join(piece["source"] for piece in pieces if not piece["grade_id"])
        assert not [said for source in own for said in screen.notices(source, given)]


WITHHELD = tuple(f"solutions.{module}" for chapter in CHAPTERS.values() for module in module_names(chapter))


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("from solutions.zero1 import ZeRO1", "line 1 uses solutions.zero1"),
        ("\nfrom solutions import zero1", "line 2 uses solutions.zero1"),
        ("import shared.checks.zero1 as check", "line 1 uses shared.checks"),
        ("import importlib\nimportlib.import_module('instructor.grade.judge')", "line 2 uses instructor"),
        ("from shared import checks", "line 1 uses shared.checks"),
    ],
)
def test_what_is_not_written_by_hand_is_named(source, refused):
    assert refused in screen.refusals(source, WITHHELD)


@pytest.mark.parametrize(
    ("source", "noticed"),
    [
        ("import gc", "line 1 uses gc"),
        ("import sys\nframe = sys._getframe(1)", "line 2 uses _getframe"),
        ("import torch\ntorch.equal = print", "line 2 sets torch.equal"),
        ("dist.all_reduce = None", "line 1 sets dist.all_reduce"),
        ("import shared.wire as wire\nwire.x.y = 1", "line 2 sets wire.x.y"),
    ],
)
def test_what_a_person_should_look_at_is_named(source, noticed):
    assert noticed in screen.notices(source)


def test_plain_code_is_neither_refused_nor_noticed():
    source = "import torch\nfrom solutions.models import x\nself.queue.kind = 'solutions.zero1x'\ntensor.grad = None"
    assert screen.refusals(source, WITHHELD) == [] == screen.notices(source)
