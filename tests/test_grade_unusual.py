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


def test_unusual_code_that_runs_in_a_notebook_gets_all_points(tmp_path):
    """Try a deadline for a cell, a __future__ import, names that every rank has, magics, and a call at the end.

    A helper in a new cell uses constants of that cell; test_grade_assembly.py tries the other kinds. The grader's umask
    is strict: on a hardened server, root's new files are for root alone, but the judge runs as another user.
    """

    def change(notebook):
        def rewrite(name, *pairs, end=""):
            cell = cell_of(notebook, name)
            for old, new in pairs:
                assert old in cell.source
                cell.source = cell.source.replace(old, new)
            cell.source += end

        rewrite("sum-over-ranks", ("%%ranks", "%%ranks --timeout 20"), end="\nx = sum_over_ranks(rank + 0.5)\nprint(x)")
        rewrite("global-mean", ("%%ranks\n", "%%ranks\nfrom __future__ import annotations\nimport math\n"))
        given_names = ("rank, world_size = dist.get_rank(), dist.get_world_size()", "größe = world_size")
        rewrite("pass-right", given_names, ("(rank - 1) % world_size", "left()"))
        rewrite(
            "log-mean-loss", ("\n", "\r\n"), ("    ", "\t"), end="\r\nif __name__ == '__main__':\r\n\tdisplay(rank)"
        )
        magics = (
            "\n%time broadcast_by_hand(torch.ones(3, device=device), 0)\n!ls\nif rank == 0:\n    %matplotlib inline"
        )
        rewrite("broadcast-by-hand", end=magics)
        notebook.cells.insert(3, nbformat.v4.new_code_cell(HELPERS))

    need_sandbox()
    before = os.umask(0o077)
    try:
        with course.unpacked(CHAPTERS[LAB]) as unpacked:
            record = grading.grade(hand_in(tmp_path, "anna", LAB, change), unpacked, Limits())
    finally:
        os.umask(before)
    assert (record.why, record.points, record.notes) == ("all checks passed", 15.0, [])
    assert any("def left" in code for code in record.code.values()), "the page shows code of other cells, too"


def test_an_exercise_that_needs_a_wrong_one_is_judged_with_our_own(tmp_path):
    """Ours replaces 1.1 for 1.2, but not for 1.7, because our own 1.7 does not use 1.1.

    A right exercise once got no points, because an earlier exercise that it calls was wrong. The code of 1.1 is nested
    deeply, and once stopped the grading of its own submission.
    """
    need_sandbox()
    lab = "01_collectives"
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        chosen = tuple(task for task in unpacked.tasks if task.number in ("1.1", "1.2", "1.3", "1.7"))
        ring = f"%%ranks\n{unpacked.ours['ring-reduce-scatter']}"
        sources = {
            "ring_step": "%%ranks\ndef ring_step(*_):\n    raise ValueError\n\n_deep = " + "-" * 900 + "1\n",
            "ring_reduce_scatter": ring,
            "ring_all_gather": unpacked.stubs["ring-all-gather"],
            "direct_reduce_scatter": ring.replace("def ring_reduce_scatter", "def direct_reduce_scatter"),
        }
        submission = hand_in(tmp_path, "anna", lab, writes(**sources))
        record = grading.grade(submission, replace(unpacked, tasks=chosen), Limits())
    step, right, blank, other = record.answers
    assert (step.points, right.points, blank.points, other.points) == (0, right.max_points, 0, 0), record.why
    assert [answer.replaced_by_ours for answer in record.answers] == [[], ["1.1"], [], []]
    assert blank.reason == "unanswered"
    assert "1.2 ring_reduce_scatter: passed (judged with the course's own 1.1)" in record.why
    assert step.verdicts and all("candidate.py" not in verdict.evidence for verdict in step.verdicts)


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
