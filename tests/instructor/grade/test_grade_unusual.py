"""Unusual but honest notebooks get their points: whatever runs in a notebook also runs in the grader."""

import copy
import json
import os
import signal
import time
from dataclasses import replace

import nbformat
import pytest

from instructor import build
from instructor.grade import assembly, course, dashboard, grading, judge, outputs, reader, records, submissions, tasks
from instructor.grade.limits import Limits
from instructor.grade.policy import Policy
from shared.deadlines import scaled
from tests.handed_in import CHAPTERS, cell_of, cells_of, hand_in, need_sandbox, pieces_of, writes

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_of_our_own")]

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

    A helper in a new cell uses constants of that cell; test_submissions.py tries the other kinds. The grader's
    new files are for root alone, as on a hardened server, but the judge runs as another user.
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


TASKS = tasks.tasks_of(CHAPTERS["00_ranks"])


def graded(folder, lab: str, numbers: tuple[str, ...], sources: dict[str, str]):
    """Grade the exercises with these numbers in a submission with these sources, and return its record."""
    need_sandbox()
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        chosen = tuple(task for task in unpacked.tasks if task.number in numbers)
        assert len(chosen) == len(numbers)
        return grading.grade(hand_in(folder, "eve", lab, writes(**sources)), replace(unpacked, tasks=chosen), Limits())


def ours(lab: str, name: str) -> str:
    """Return our own solution of an exercise."""
    notebook = build.solution_of(CHAPTERS[lab])
    cells = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("solution")]
    return next(cell.source for cell in cells if cell.metadata["nbgrader"]["grade_id"] == name)


CODE_IN_A_TEXT = '''%%ranks
NOTES = """
from __future__ import annotations; from torch.nn.parallel import DistributedDataParallel as Wrapper; import sys
"""

class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        broadcast_state(module, group)
        options = {"find_unused_parameters": True, "broadcast_buffers": False}
        self.module, self.hidden = module, [Wrapper(module, process_group=group, **options)]

    def forward(self, *inputs, **kwargs):
        return self.hidden[0](*inputs, **kwargs)

    def finish_gradient_sync(self):
        pass
'''


def test_a_text_stays_a_text():
    """A line of a string that looked like a __future__ import once ran at the top of the file, unscreened."""
    cell = {"grade_id": "x", "source": CODE_IN_A_TEXT.removeprefix("%%ranks\n"), "line": 1}
    source, _ = assembly.assembled([cell], "")
    assert source.strip() == cell["source"].strip()


DEEP = "def f(*_):\n    raise ValueError\n\n_deep = " + "-" * 900 + "1\n"


def record_with(code: str, student: str = "eve"):
    answers = [records.Answer(task.number, task.name, 1.0, 1.0, cells=list(task.cells)) for task in TASKS]
    cells = [cell for answer in answers for cell in answer.cells]
    return records.Record(student, "00_ranks", "", answers, code=dict.fromkeys(cells, code))


@pytest.mark.parametrize(
    "code", [DEEP, "x = '\ud800'\n" * 40, "# \x00\n" * 40, "def f():\n" * 1 + "    return " + "[" * 190 + "]" * 190]
)
def test_no_code_stops_the_dashboard(tmp_path, code):
    """A right exercise with a deeply nested expression once made the command fail after everybody had been graded."""
    found = [record_with(code), record_with("def f(x):\n    return x + 1\n" * 20, "ada")]
    dashboard.write(found, tmp_path)
    kept = outputs.Outputs(tmp_path, Policy())
    for record in found:
        kept.save(record, submissions.Submission(record.student, record.lab, None))
    kept.write_all()


def test_second_chances_are_decided_in_a_short_time(tmp_path, monkeypatch):
    """The grader finds out outside of the sandbox which cells use which others. Nothing else limits the time there."""
    lab = "13_tensor_parallel"
    many = "\n".join(f"x{i} = [sum_over_ranks, {i}]" for i in range(14_000))
    submission = hand_in(tmp_path, "eve", lab, writes(sum_over_ranks="%%ranks\n" + many))
    monkeypatch.setattr(grading.Grading, "_judged", lambda self, tasks, pieces: {})
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        record = records.Record("eve", lab, "", [])
        judging = grading.Grading(cells_of(submission), unpacked, Limits(), record)
        failed = {task.name: grading._answer(task, [], "wrong") for task in unpacked.tasks}
        began = time.monotonic()
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
        signal.alarm(int(scaled(20)))
        try:
            judging._second_chances(failed)
        finally:
            signal.alarm(0)
    assert time.monotonic() - began < scaled(20)


LONG_EVIDENCE = """%%ranks
def pass_right(tensor):
    raise ValueError("(Drawn with " * 80_000)
"""


def test_a_name_that_a_student_gave_a_cell_is_not_shown(tmp_path, monkeypatch):
    """Copied cells were once reported by the name in their metadata, which may be any text."""

    def change(notebook):
        for _ in range(2):
            cell = dict(notebook.cells[-1], cell_type="code", source="x = 1", outputs=[], execution_count=None)
            cell["id"] = f"eve{_}"
            cell["metadata"] = {"nbgrader": {"solution": True, "grade_id": "<script>" + "\n=cmd|x;" * 60_000}}
            notebook.cells.append(build.nbformat.from_dict(cell))

    submission = hand_in(tmp_path, "eve", "00_ranks", change)
    monkeypatch.setattr(grading, "_read", lambda *_: cells_of(submission))
    monkeypatch.setattr(grading.Grading, "answers", lambda self: {})
    with course.unpacked(CHAPTERS["00_ranks"]) as unpacked:
        record = grading.grade(submission, unpacked, Limits())
    kept = outputs.Outputs(tmp_path / "out", Policy())
    kept.save(record, submissions.Submission("eve", "00_ranks", None))
    page = (tmp_path / "out/feedback/eve/00_ranks.html").read_text()
    assert "<script>\n=cmd" not in page
    assert all(len(note) < 10_000 for note in record.notes)


PERCENT = """%%ranks
def pass_right(tensor):
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return tensor.clone()
    right = (
        (rank + 1)
        % size
    )
    received = torch.empty_like(tensor)
    works = [dist.isend(tensor, right), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    return received

%time pass_right(torch.ones(2))
"""
SAME_HELPER = (
    """%%ranks
def _total(value):
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()

def sum_over_ranks(value):
    return _total(value)
""",
    """%%ranks
def _total(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)])
    dist.all_reduce(total)
    return total

def global_mean(values):
    total, count = _total(values)
    return (total / count).item()
""",
)
A_GROUP_EACH_TIME = """%%ranks
def average_gradients(module, group=None):
    group = group or dist.new_group()  # of all ranks
    world_size = dist.get_world_size(group)
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            p.grad /= world_size
"""
TWO_MEANINGS = (  # Each exercise has a constant of its own, but both constants have the same name.
    """%%ranks
SIZE = 1  # elements

def sum_over_ranks(value):
    total = torch.full((SIZE,), value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
""",
    """%%ranks
SIZE = 2  # the sum and the count

def global_mean(values):
    total = torch.zeros(SIZE, dtype=torch.float64)
    total[0], total[1] = values.sum(), len(values)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
""",
)
GROWS = """%%ranks
_history = []

def log_mean_loss(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    _history.append(mean)  # for a plot later
    return mean.item() if dist.get_rank() == 0 else None

# A notebook has four ranks. Grading loads the file again before each probe, sometimes on fewer ranks.
assert log_mean_loss(torch.tensor(float(rank))) in (1.5, None)  # (0 + 1 + 2 + 3) / 4
"""
TRIES_A_LARGE_ONE = (
    ours("00_ranks", "broadcast-by-hand")
    + """

example = torch.full((200_000,), float(rank))
broadcast_by_hand(example, 0)
print(example[0].item())
"""
)
ADDS_SAMPLES = "dist.all_reduce(total_samples, group=group)"
FROM_MINE = (
    ours("02_manual_ddp", "weighted")
    .replace("%%ranks\n", "%%ranks\nfrom shared.mine import sum_over_ranks  # as its documentation says\n", 1)
    .replace(ADDS_SAMPLES, f"total_samples.fill_(sum_over_ranks(float(samples))) if group is None else {ADDS_SAMPLES}")
)
# Its own wait, a global setting of torch, and a line that asks for help
MEASURES = (
    SAME_HELPER[0]
    + """

torch.use_deterministic_algorithms(True)
import time as clock
began = clock.perf_counter()
while clock.perf_counter() - began < 0.5:  # how many calls are there in half a second?
    pass
?dist.all_reduce
"""
)
STEPS = (
    A_GROUP_EACH_TIME
    + """

_layer = nn.Linear(2, 2)
_optimizer = torch.optim.AdamW(_layer.parameters())
_layer(torch.ones(2)).sum().backward()
_optimizer.step()
"""
)
A_LOCAL_GROUP = """%%ranks
def mean_over_ranks_(tensor, group=None):
    group = group or dist.new_group([*range(dist.get_world_size())], use_local_synchronization=True)
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)
"""
# The first exercise fails with the helper of the second one, and is defined there once more.
DEFINED_LATER = (
    SAME_HELPER[0].replace("def sum_over_ranks(value):", "def _unused(value):"),
    SAME_HELPER[1] + "\n\ndef sum_over_ranks(value):\n    return 0.0\n",
)
HONEST = {
    "a constant with two meanings, a line that begins with %, a history, and examples": (
        "00_ranks",
        ("0.1", "0.2", "0.3", "0.4", "0.5"),
        {
            "sum_over_ranks": TWO_MEANINGS[0],
            "global_mean": TWO_MEANINGS[1],
            "pass_right": PERCENT,
            "log_mean_loss": GROWS,
            "broadcast_by_hand": TRIES_A_LARGE_ONE,
        },
    ),
    "two helpers of the same name, and a measurement": (
        "00_ranks",
        ("0.1", "0.2"),
        {"sum_over_ranks": MEASURES, "global_mean": SAME_HELPER[1]},
    ),
    "groups for each call, a step of an optimizer, and a piece from shared.mine": (
        "02_manual_ddp",
        ("2.1", "2.3", "2.5"),
        {"mean_over_ranks": A_LOCAL_GROUP, "average_gradients": STEPS, "weighted": FROM_MINE},
    ),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """The record of a submission with two wrong exercises and a right one."""
    sources = dict(zip(("sum_over_ranks", "global_mean"), DEFINED_LATER, strict=True)) | {"pass_right": LONG_EVIDENCE}
    return graded(tmp_path_factory.mktemp("wrong"), "00_ranks", ("0.1", "0.2", "0.3"), sources)


def test_a_second_run_without_the_piece_changes_nothing(wrong):
    """The cells up to 0.1 do not define its function, so they cannot be judged alone. Its first verdicts count."""
    one, other, _ = wrong.answers
    assert one.points == 0 and one.verdicts and not one.reason
    assert other.points == other.max_points


def test_a_long_error_does_not_delay_the_dashboard(wrong, tmp_path):
    assert any("Drawn with" in verdict.evidence for verdict in wrong.answers[2].verdicts)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
    signal.alarm(int(scaled(20)))
    try:
        dashboard.write([wrong], tmp_path)
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("name", HONEST)
def test_honest_work_gets_every_point(tmp_path, name):
    lab, numbers, sources = HONEST[name]
    record = graded(tmp_path, lab, numbers, sources)
    assert [answer.points for answer in record.answers] == [answer.max_points for answer in record.answers]
