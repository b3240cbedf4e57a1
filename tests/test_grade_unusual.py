"""Unusual but honest notebooks get their points: whatever runs in a notebook also runs in the grader."""

import copy
import json
import os
from dataclasses import replace

import nbformat
import pytest

from instructor.grade import course, grading, judge, reader
from instructor.grade.limits import Limits
from tests.handed_in import CHAPTERS, cell_of, hand_in, need_sandbox, pieces_of, writes

pytestmark = pytest.mark.exhaustive

LAB = "00_ranks"


def saved_otherwise(folder, change) -> list[dict]:
    """Return the pieces of our own solution after a change to its file."""
    submission = hand_in(folder, "anna", LAB)
    notebook = json.loads(submission.path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    change(notebook, code)
    submission.path.write_text(json.dumps(notebook), encoding="utf-8-sig")
    return pieces_of(submission)


SAVED = {
    "with a byte order mark": lambda notebook, code: None,
    "with a field that the format does not have": lambda notebook, code: code[0].update(colab="x"),
    "without outputs": lambda notebook, code: [cell.pop("outputs") for cell in code],
    "without counts": lambda notebook, code: [cell.pop("execution_count") for cell in code],
    "with a broken output": lambda notebook, code: code[0]["outputs"].append({"output_type": "stream"}),
    "by an older editor": lambda notebook, code: (
        notebook.update(nbformat_minor=2),
        [cell.pop("id") for cell in notebook["cells"]],
    ),
    "with another first line": lambda notebook, code: [
        cell.update(source=["%%ranks --timeout 20\r\n", "%%time\n", *cell["source"][1:]])
        for cell in code
        if cell["source"][0].startswith("%%ranks")
    ],
}


@pytest.mark.parametrize("how", SAVED)
def test_a_notebook_counts_however_it_was_saved(tmp_path, how):
    plain = pieces_of(hand_in(tmp_path / "1", "anna", LAB))
    found = saved_otherwise(tmp_path / "2", SAVED[how])
    own = [(piece["grade_id"], piece["source"]) for piece in found]
    assert own == [(piece["grade_id"], piece["source"]) for piece in plain]


def test_broken_grading_metadata_costs_only_its_own_cell(tmp_path):
    for metadata in ([1], "x", {"solution": True, "grade_id": [1]}):

        def change(notebook, code, metadata=metadata):
            first = next(cell for cell in code if cell["metadata"].get("nbgrader", {}).get("solution"))
            first["metadata"]["nbgrader"] = copy.deepcopy(metadata)

        assert len(saved_otherwise(tmp_path, change)) == 5


def test_a_notebook_with_countless_cells_is_rejected_quickly(tmp_path):
    def change(notebook, code):
        notebook["cells"] += [{"cell_type": "raw", "metadata": {}, "source": "", "id": "a"}] * 100_000

    with pytest.raises(reader.Unreadable, match="more than 2000 cells"):
        saved_otherwise(tmp_path, change)


def graded(folder, change):
    need_sandbox()
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        return grading.grade(hand_in(folder, "anna", LAB, change), unpacked, Limits())


def test_unusual_code_that_runs_in_a_notebook_gets_all_points(tmp_path):
    """Try a deadline for a cell, a __future__ import, names that every rank has, magics, and a call at the end."""

    def change(notebook):
        def rewrite(name, *pairs, end=""):
            cell = cell_of(notebook, name)
            for old, new in pairs:
                assert old in cell.source
                cell.source = cell.source.replace(old, new)
            cell.source += end

        rewrite("sum-over-ranks", ("%%ranks", "%%ranks --timeout 20"), end="\nx = sum_over_ranks(rank + 0.5)\nprint(x)")
        rewrite("global-mean", ("%%ranks\n", "%%ranks\nfrom __future__ import annotations\nimport math\n"))
        rewrite("pass-right", ("rank, world_size = dist.get_rank(), dist.get_world_size()", "größe = world_size"))
        rewrite(
            "log-mean-loss", ("\n", "\r\n"), ("    ", "\t"), end="\r\nif __name__ == '__main__':\r\n\tdisplay(rank)"
        )
        magics = (
            "\n%time broadcast_by_hand(torch.ones(3, device=device), 0)\n!ls\nif rank == 0:\n    %matplotlib inline"
        )
        rewrite("broadcast-by-hand", end=magics)

    record = graded(tmp_path, change)
    assert (record.why, record.points, record.notes) == ("all checks passed", 15.0, [])


def test_a_strict_umask_of_the_grader_costs_no_points(tmp_path):
    """On a hardened server, root's new files are for root alone, but the judge runs as another user."""
    before = os.umask(0o077)
    try:
        record = graded(tmp_path, lambda notebook: None)
    finally:
        os.umask(before)
    assert (record.why, record.points) == ("all checks passed", 15.0)


HELPERS = """%%ranks
try:
    import numpy as np
except ImportError:
    np = None
from collections import namedtuple

Mean = namedtuple("Mean", "value"); LEFT, RIGHT = -1, +1


def left():
    return (rank + LEFT) % world_size
"""


def test_other_cells_count_as_they_do_in_the_notebook(tmp_path):
    """A helper in a new cell uses constants of that cell. test_grade_assembly.py tries the other kinds."""

    def change(notebook):
        pass_right = cell_of(notebook, "pass-right")
        assert "(rank - 1) % world_size" in pass_right.source
        pass_right.source = pass_right.source.replace("(rank - 1) % world_size", "left()")
        notebook.cells.insert(3, nbformat.v4.new_code_cell(HELPERS))

    record = graded(tmp_path, change)
    assert (record.why, record.points, record.notes) == ("all checks passed", 15.0, [])
    assert any("def left" in code for code in record.code.values()), "the page shows code of other cells, too"


def test_an_exercise_that_needs_a_wrong_one_is_judged_with_our_own(tmp_path):
    """A right ManualDDP once got 0 of 3 points, because an earlier exercise that it calls was wrong."""
    need_sandbox()
    wrong = "%%ranks\ndef broadcast_state(module, src=0):\n    raise ValueError('not yet')"
    lab = "02_manual_ddp"
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        chosen = tuple(task for task in unpacked.tasks if task.number in ("2.2", "2.4", "2.6"))
        sources = {"broadcast_state": wrong, "sharded_sampler": unpacked.stubs["sharded-sampler"]}
        submission = hand_in(tmp_path, "anna", lab, writes(**sources))
        record = grading.grade(submission, replace(unpacked, tasks=chosen), Limits())
    state, ddp, sampler = record.answers
    assert (state.points, ddp.points, sampler.points) == (0, ddp.max_points, 0), ddp.verdicts
    assert ddp.replaced_by_ours == ["2.2"] and sampler.reason == "unanswered" and not state.replaced_by_ours
    assert "2.4 ManualDDP: passed (judged with the course's own 2.2)" in record.why
    assert all("candidate.py" not in verdict.evidence for verdict in state.verdicts)


def test_another_name_for_our_own_code_earns_nothing(tmp_path):
    """1.2 does not work, so our own code may replace it. 1.7 calls it, but our solution of 1.7 does not."""
    need_sandbox()
    sources = {
        "ring_reduce_scatter": "%%ranks\ndef ring_reduce_scatter(tensor, group=None):\n    pass",
        "direct_reduce_scatter": """%%ranks
def direct_reduce_scatter(tensor, group=None):
    return ring_reduce_scatter(tensor, group)""",
    }
    lab = "01_collectives"
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        chosen = tuple(task for task in unpacked.tasks if {*task.cells} <= {name.replace("_", "-") for name in sources})
        assert len(chosen) == 2
        submission = hand_in(tmp_path, "eve", lab, writes(**sources))
        record = grading.grade(submission, replace(unpacked, tasks=chosen), Limits())
    assert [(answer.points, answer.replaced_by_ours) for answer in record.answers] == [(0, []), (0, [])]


def test_places_are_lines_of_the_students_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"grade_id": None, "place": None, "source": "import os", "line": 1}
    own = {"grade_id": "f", "place": "exercise 0.1", "source": "def f():\n    return 1", "line": 3}
    job = {"module": "first_collectives", "cells": [given, own]}
    judge_here = judge.Judge(job, None, [], [], [judge.NOT_MEASURED])
    judge_here._write([given, own])
    lines = (tmp_path / "candidate.py").read_text().splitlines()
    for text, place in (("    return 1", "exercise 0.1, line 4"), ("import os", "the lab's own code")):
        number = lines.index(text) + 1
        assert judge_here._placed(f"Rank 0 is at candidate.py, line {number}: x") == f"Rank 0 is at {place}: x"
