"""A student's exercises are extracted from a notebook by name, and become the file that the ranks load.

An unreadable notebook is reported in one sentence. The file has what exercises use from other cells, and no code that
only tries an exercise.
"""

import ast
import json
import os

import nbformat
import pytest

from instructor import build
from instructor.grade import assembly, finding, reader, static_checks, submissions
from instructor.grade.finding import find
from instructor.grade.reader import Unreadable
from instructor.grade.submissions import Submission
from tests.handed_in import CHAPTERS, cell_of, cells_of, hand_in, pieces_of

LAB = "02_manual_ddp"
CHAPTER = CHAPTERS[LAB]


def handed_in(folder, student: str, change=lambda notebook: None) -> Submission:
    return hand_in(folder, student, LAB, change)


def candidate_of(submission: Submission) -> str:
    return "\n\n\n".join(piece["source"] for piece in pieces_of(submission))


def test_every_folder_is_a_student_with_or_without_a_notebook(tmp_path):
    handed_in(tmp_path, "anna")
    (tmp_path / "ben").mkdir()
    flat = tmp_path / "cleo" / f"{LAB}.ipynb"
    flat.parent.mkdir()
    flat.write_text("{}")
    (tmp_path / "dora").mkdir()
    (tmp_path / "dora" / "03_gradient_bucketing.ipynb").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("not a student")
    downloaded = tmp_path / "emma" / f"{LAB} (1).ipynb"
    downloaded.parent.mkdir()
    downloaded.write_text("{}")
    found = find(tmp_path, LAB)
    assert [(submission.student, submission.path and submission.path.name) for submission in found] == [
        ("anna", f"{LAB}.ipynb"),
        ("ben", None),
        ("cleo", f"{LAB}.ipynb"),
        ("dora", None),
        ("emma", f"{LAB} (1).ipynb"),
    ]
    assert [lab.name for lab in finding.labs_in(tmp_path)] == [LAB, "03_gradient_bucketing"]


def test_our_own_solution_becomes_our_own_module(tmp_path):
    candidate = candidate_of(handed_in(tmp_path, "anna"))
    built = next(iter(build.modules_of(CHAPTER).values()))
    assert [ast.dump(node) for node in ast.parse(candidate).body] == [ast.dump(node) for node in ast.parse(built).body]


def test_only_exercises_count_and_in_any_order(tmp_path):
    def change(notebook):
        for cell in notebook.cells:
            if "check" in cell.metadata.get("tags", []):
                cell.source = "print('all passed')"
        notebook.cells.insert(0, nbformat.v4.new_code_cell("import os\nos.cheated = True"))
        notebook.cells.reverse()

    plain, changed = handed_in(tmp_path / "1", "anna"), handed_in(tmp_path / "2", "anna", change)
    assert candidate_of(changed) == candidate_of(plain)


def test_given_cells_come_from_the_instructor(tmp_path):
    def change(notebook):
        given = [cell for cell in notebook.cells if "export" in cell.metadata.get("tags", [])]
        for cell in given:
            if "exercise" not in cell.metadata["tags"]:
                cell.source = "raise SystemExit"

    assert "raise SystemExit" not in candidate_of(handed_in(tmp_path, "anna", change))


def test_a_missing_exercise_is_left_out_and_the_others_count(tmp_path):
    def change(notebook):
        notebook.cells.remove(cell_of(notebook, "mean-over-ranks"))

    candidate = candidate_of(handed_in(tmp_path, "anna", change))
    assert "def mean_over_ranks_" not in candidate and "class ManualDDP" in candidate


def write(path, text: str) -> Submission:
    path = path.parent / "anna" / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Submission("anna", LAB, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("   \n", "empty file"),
        ('{"cells": [{"cell_type": "co', "not a valid notebook"),
        ("[1, 2]", "not a valid notebook"),
        ("not json", "not a valid notebook"),
        (
            '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code"}]}',
            "not a valid notebook",
        ),
        (nbformat.writes(nbformat.v4.new_notebook()), "none of this lab's exercises"),
    ],
)
def test_a_file_that_is_no_notebook_of_this_lab_is_reported_in_one_sentence(tmp_path, text, message):
    with pytest.raises(Unreadable, match=message) as caught:
        candidate_of(write(tmp_path / "lab.ipynb", text))
    assert len(str(caught.value).splitlines()) == 1


def test_a_notebook_of_another_lab_and_a_missing_one_are_reported(tmp_path):
    submission = write(tmp_path / "lab.ipynb", nbformat.writes(build.lab_of(CHAPTERS["03_gradient_bucketing"])))
    with pytest.raises(Unreadable, match="none of this lab's exercises"):
        candidate_of(submission)
    with pytest.raises(Unreadable, match="there is no notebook for 02_manual_ddp"):
        candidate_of(Submission("ben", LAB, None))


def test_a_split_or_copied_exercise_is_joined_and_reported(tmp_path):
    def change(notebook):
        first = cell_of(notebook, "mean-over-ranks")
        again = first.copy()
        again.id, again.source = "again", "%%ranks\nhelper = mean_over_ranks_"
        notebook.cells.insert(notebook.cells.index(first) + 1, again)

    plain, split = handed_in(tmp_path / "1", "anna"), handed_in(tmp_path / "2", "anna", change)
    (changed,) = [piece for piece in pieces_of(split) if piece not in pieces_of(plain)]
    assert changed["source"].endswith("\n\nhelper = mean_over_ranks_") and "%%" not in changed["source"]
    assert submissions.repeated_exercises(cells_of(split)) == ["mean-over-ranks"]
    assert submissions.repeated_exercises(cells_of(plain)) == []


def test_a_notebook_with_too_much_output_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_BYTES", 1000)
    with pytest.raises(Unreadable, match="clear its outputs"):
        candidate_of(handed_in(tmp_path, "anna"))


def test_links_to_other_students_work_and_pipes_are_not_read(tmp_path):
    anna = handed_in(tmp_path, "anna")
    for student in ("ben", "cleo", "dora"):
        (tmp_path / student / LAB).mkdir(parents=True)
    (tmp_path / "ben" / LAB / f"{LAB}.ipynb").symlink_to(anna.path)
    (tmp_path / "cleo" / LAB).rmdir()
    (tmp_path / "cleo" / LAB).symlink_to(anna.path.parent)
    os.mkfifo(tmp_path / "dora" / LAB / f"{LAB}.ipynb")
    for submission in find(tmp_path, LAB)[1:]:
        with pytest.raises(Unreadable, match="a link or not a regular file"):
            cells_of(submission)


def test_other_files_beside_a_notebook_are_named(tmp_path):
    submission = handed_in(tmp_path, "anna")
    for name in ("shared.py", "timestamp.txt"):
        (submission.path.parent / name).write_text("")
    assert submissions.other_files(submission) == ["shared.py"]
    assert submissions.other_files(Submission("ben", LAB, None)) == []


def test_a_notebook_of_format_3_is_read():
    cell = {"cell_type": "code", "input": ["%%ranks\n", "x = 1"], "metadata": {}, "language": "python"}
    text = json.dumps({"nbformat": 3, "worksheets": [{"cells": [cell]}]})
    assert reader.code_cells_in(text.encode()) == [{"name": None, "source": "\nx = 1", "on_ranks": True}]


@pytest.mark.parametrize(("count", "source"), [(2001, "x"), (1, "x" * 500_001)])
def test_more_code_than_anybody_writes_is_reported(count, source):
    cell = {"cell_type": "code", "source": source}
    with pytest.raises(Unreadable, match="more than"):
        reader.code_cells_in(json.dumps({"cells": [cell] * count}).encode())


HOSTILE = ["[" * 100_000, '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}', "\x00"]


@pytest.mark.parametrize("text", HOSTILE, ids=["nested", "a number as a cell", "nul"])
def test_a_file_that_breaks_its_reader_is_reported_too(tmp_path, text):
    with pytest.raises(Unreadable, match="not a valid notebook"):
        candidate_of(write(tmp_path / "lab.ipynb", text))


def cell(source: str, grade_id: str | None = "own") -> dict:
    return {"cell": "own", "grade_id": grade_id, "place": "exercise 0.1", "source": source, "line": 1}


def test_imports_from_the_future_come_first():
    cells = [cell("import os\n\nfrom __future__ import annotations; x = 1"), cell("from __future__ import division")]
    source, places = assembly.assembled(cells, "prelude = 1")
    assert source.startswith("from __future__ import annotations, division\nprelude = 1\n\n")
    compile(source, "file", "exec")
    lines = source.splitlines()
    assert [lines[begins - 1] for begins, _ in places] == ["import os", "pass"]
    assert lines[places[0][0] + 1] == "pass; x = 1"


EXAMPLES = {
    "an assertion": ("def f():\n    assert True\n\nassert f(\n    1\n) == 2; y = 3", "without_asserts"),
    "a letter of two bytes": ("s = 'é'; assert s; y = 3", "without_asserts"),
    "code that defines nothing": ("z = f(3)\nprint(z)\nfor _ in range(3):\n    f(1)\ndef f(x):\n    return x", "both"),
}
LEFT = {
    "an assertion": "def f():\n    assert True\n\npass; y = 3\n\n",
    "a letter of two bytes": "s = 'é'; pass; y = 3",
    "code that defines nothing": "pass\npass\npass\n\ndef f(x):\n    return x",
}


@pytest.mark.parametrize("what", EXAMPLES)
def test_examples_are_left_out_and_lines_keep_their_numbers(what):
    source, how = EXAMPLES[what]
    if how == "both":
        assert assembly.without_asserts([cell(source)]) == [cell(source)]
    leaving_out = assembly.without_asserts if how == "without_asserts" else assembly.without_examples
    assert [each["source"] for each in leaving_out([cell(source)])] == [LEFT[what]]


NEEDED = """
SIZES = {}
SIZES["x"] = 3
torch.manual_seed(0)
items = []
items.append(len)
unused = f(2)
if True:
    half = 0.5

def f(x):
    return helper(x) * SIZES["x"] * half * len(items)

f.calls = 0
helper = lambda x: x * factor
factor = 2
assert factor
"""


def test_whatever_functions_use_stays():
    (left,) = assembly.without_examples([cell(NEEDED)])
    assert left["source"] == NEEDED.replace("unused = f(2)", "pass").replace("assert factor", "pass")


def test_the_labs_own_cells_stay():
    given = cell("print(value)\nassert value", grade_id=None)
    assert assembly.without_examples([given, cell("value = 3")]) == [given, cell("value = 3")]
    assert assembly.without_asserts([given]) == [given]


STUB = "def answer():\n    raise NotImplementedError('your code here')\n"
USES = "def answer():\n    return "
# The cells of a notebook: exercises have names, other cells have none. `answer()` must return 3 in the notebook.
NOTEBOOKS = {
    "an import in the lab's own cell": {"": "import os, math", "answer": USES + "math.floor(3.5)"},
    "an import under a try": {
        "": "try:\n    import nothing_of_that_name\nexcept ImportError:\n    import math\n",
        "answer": USES + "math.floor(3.5)",
    },
    "a module of a package": {"": "import os.path\n", "answer": USES + "len(os.path.join('', 'abc'))"},
    "a partial in the answer's cell": {
        "": "from functools import partial\ndef add(a, b):\n    return a + b",
        "answer": "from functools import partial\nanswer = partial(add, 1, 2)",
    },
    "a decorator": {
        "": "def plus_one(f):\n    def changed():\n        return f() + 1\n    return changed",
        "answer": "@plus_one\n" + USES + "2",
    },
    "constants that are unpacked": {"": "ONE, (TWO, *REST) = 1, (2, 3)", "answer": USES + "ONE * TWO + len(REST)"},
    "two statements in a line": {"": "a = 1; b = a + 1; print(b); c = [b]", "answer": USES + "c[0] + a"},
    "a variable that changes": {"": "SIZES = []\nSIZES.append(3)\nSIZES[0] -= 1", "answer": USES + "SIZES[0] + 1"},
    "a magic line": {"": "\n%matplotlib inline\nx = 3\n!ls\nx?\n", "answer": USES + "x"},
    "an error between two definitions": {"": "x = 2\n1 / 0\ny = 1", "answer": USES + "x + y"},
    "annotations that do not exist": {
        "": "from __future__ import annotations",
        "answer": "def answer() -> Missing:\n    return 3",
    },
    "everything of a module": {"": "from math import *", "answer": USES + "floor(3.5)"},
    "a helper of a helper, below": {"answer": USES + "f()", "": "def f():\n    return g()\ndef g():\n    return 3"},
    "a helper class at the end": {"answer": USES + "Pair(1, 2).total()", "later": "pass", "": """
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
    b: int
    def total(self):
        return self.a + self.b"""},
    "the answer in a new cell": {"answer": STUB, "": USES + "3", "later": "x = 1"},
    "the answer above the exercise": {"": USES + "3", "answer": STUB, "later": "x = 1"},
    "a better answer in a later cell": {"answer": USES + "2", "": USES + "3"},
    "a method in a new cell": {
        "answer": "class Ring:\n    pass\ndef answer():\n    return Ring().size()",
        "": "class Ring(Ring):\n    def size(self):\n        return 3",
    },
    "a method that is set": {
        "answer": "class Ring:\n    size = 2\ndef answer():\n    return Ring.size",
        "": "Ring.size = 3",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", NOTEBOOKS)
def test_what_works_in_a_notebook_works_in_the_file(kind):
    notebook = NOTEBOOKS[kind]
    cells = [{"name": name or None, "source": source, "on_ranks": True} for name, source in notebook.items()]
    own = [cell(source) | {"cell": name, "grade_id": name} for name, source in notebook.items() if name]
    own = [cell("import os", grade_id=None) | {"cell": None}, *own]
    others = [other | {"place": "another cell"} for other in submissions.other_cells(cells)]
    for other in others:
        other["source"] = static_checks.without_magics(other["source"])
    added = assembly.from_other_cells(own, others, ["answer"], ["dist"])
    blank = [name for name, source in notebook.items() if source == STUB]
    source, _ = assembly.assembled(assembly.inserted(own, added, blank), "")
    namespace: dict = {"__name__": "candidate"}
    exec(compile(source, "candidate.py", "exec"), namespace)
    assert namespace["answer"]() == 3
    assert "print" not in source and "1 / 0" not in source, "only what the answer uses is taken"


def test_the_lab_s_own_code_and_the_cells_of_the_kernel_stay_out_of_it():
    given = cell("def given():\n    return 1", grade_id=None)
    mine = cell("def answer():\n    return given() + in_kernel + unused_here", grade_id="answer")
    cells = [
        {"name": None, "source": "def given():\n    return 2\nx = 3", "on_ranks": True},
        {"name": None, "source": "in_kernel = 1", "on_ranks": False},
        {"name": "answer", "source": mine["source"], "on_ranks": True},
    ]
    assert assembly.from_other_cells([given, mine], submissions.other_cells(cells), ["answer"], []) == []
