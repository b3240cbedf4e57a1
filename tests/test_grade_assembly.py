"""The file that the ranks load has what exercises use from other cells, and no code that only tries an exercise."""

import pytest

from instructor.grade import assembly, static_checks, submissions


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
