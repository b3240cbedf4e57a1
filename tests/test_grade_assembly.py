"""The file that the ranks load leaves out code that only tries an exercise, and lines keep their numbers."""

import pytest

from instructor.grade import assembly


def cell(source: str, grade_id: str | None = "own") -> dict:
    return {"grade_id": grade_id, "exercise": "0.1", "source": source, "line": 1}


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
