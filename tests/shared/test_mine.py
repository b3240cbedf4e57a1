"""A student's own pieces are saved and can be imported by later labs, and a class can be continued in a later cell."""

import ast
import os
import sys

import pytest
import torch
from torch import nn

from shared import mine
from shared.ranks.continued import ContinueClasses
from shared.ranks.definitions import Definitions

LAB = (
    "import torch\nimport torch.distributed as dist\nfrom torch import nn\n\nSCALE = 2\n",
    "def helper(x):\n    return x * SCALE  # twice\n\n\ndef unused(x):\n    return x",
    "@torch.no_grad()\ndef double(x):\n    return helper(x)",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "ROOT", tmp_path)
    yield tmp_path / "mine"
    for name in [name for name in sys.modules if name.startswith("mine.")]:
        del sys.modules[name]


def cells_of(*sources: str) -> list:
    definitions = Definitions()
    for source in sources:
        definitions.remember(source, None)
    return definitions.cells


def test_a_piece_is_saved_with_what_it_uses_and_imported(folder):
    mine.save("doubling", "double", cells_of(*LAB))
    from shared.mine import double

    assert double(3) == 6
    text = (folder / "doubling.py").read_text()
    assert "# twice" in text and "@torch.no_grad()" in text, "the source is the student's"
    assert "unused" not in text and "nn" not in text.split(), "only what the piece uses"


def test_a_better_version_replaces_the_earlier_one_and_other_pieces_stay(folder):
    mine.save("doubling", "double", cells_of(*LAB))
    better = ("def helper(x):\n    return x + x", "def quadruple(x):\n    return helper(helper(x))")
    mine.save("doubling", "quadruple", cells_of(*LAB, *better))
    text = (folder / "doubling.py").read_text()
    assert text.count("def helper") == 1 and text.index("def helper") < text.index("def double")
    from shared.mine import double, quadruple

    assert (double(3), quadruple(3)) == (6, 12)


def test_a_class_in_two_cells_is_saved_whole(folder):
    cells = "class Ring:\n    size = 4", "class Ring(Ring):\n    def step(self):\n        return self.size"
    mine.save("rings", "Ring", cells_of(*cells))
    mine.save("rings", "Ring", cells_of(*cells))
    assert (folder / "rings.py").read_text().count("class Ring") == 2
    assert mine.Ring().step() == 4


def test_the_newest_of_two_labs_counts(folder):
    mine.save("first", "piece", cells_of("def piece():\n    return 1"))
    mine.save("second", "piece", cells_of("def piece():\n    return 2"))
    os.utime(folder / "first.py", (1, 1))
    assert mine.piece() == 2


def test_a_piece_that_uses_the_notebooks_variables_is_not_saved(folder):
    with pytest.raises(
        mine.NotSaved, match=r"it uses rank, which exists only in %%ranks cells; dist.get_rank\(\) works"
    ):
        mine.save("bad", "piece", cells_of("def piece():\n    return rank"))
    with pytest.raises(mine.NotSaved, match="no cell defines piece"):
        mine.save("bad", "piece", cells_of("x = 1"))
    assert not folder.exists()


def test_a_parameter_or_a_variable_named_rank_is_allowed(folder):
    mine.save("good", "piece", cells_of("def piece():\n    rank = 3\n    return rank"))
    mine.save("good", "other", cells_of("def other(device):\n    return device"))
    assert (mine.piece(), mine.other(2)) == (3, 2)


def test_a_piece_that_has_not_passed_is_an_import_error_that_says_what_to_do(folder):
    with pytest.raises(ImportError, match=r"There is no piece in mine/.*import ours from solutions"):
        from shared.mine import piece  # noqa: F401
    assert not hasattr(mine, "_ipython_display_")


# -- `class Name(Name):` adds methods to a class that an earlier cell has begun


def run(*cells: str, **names) -> dict:
    """Run cells in one namespace, as a rank does."""
    namespace = {"__name__": "notebook", "nn": nn, **names}
    for source in cells:
        tree = ast.fix_missing_locations(ContinueClasses().visit(ast.parse(source)))
        exec(compile(tree, "cell", "exec"), namespace)
    return namespace


BEGUN = """
class Net(nn.Linear):
    "A layer."
    scale: float

    def __init__(self):
        super().__init__(2, 2)
"""
CONTINUED = """
class Net(Net):
    shift: float

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    @property
    def size(self):
        return __class__.__name__, len(list(super().parameters()))

    @classmethod
    def base(cls):
        return super().__thisclass__
"""


def test_methods_are_added_to_the_class_and_its_objects():
    found = run(BEGUN, "begun, net = Net, Net()", CONTINUED)
    assert found["Net"] is found["begun"]
    assert found["net"].size == ("Net", 2)
    assert found["Net"].__doc__ == "A layer."
    assert found["Net"].__annotations__ == {"scale": float, "shift": float}


def test_super_leads_to_the_bases_of_the_whole_class_however_often_the_cell_runs():
    net = run(BEGUN, CONTINUED.replace("super().__init__()", "super().__init__(2, 2)"), CONTINUED, BEGUN)["Net"]()
    assert not hasattr(net, "calls"), "a class that begins again is a new one"
    continued = CONTINUED.replace("super().__init__()", "super().__init__(2, 2)")
    net = run(BEGUN, *[continued] * 3)["Net"]()
    net(torch.ones(2))
    assert net.calls == 1 and net.size == ("Net", 2) and net.base() is type(net)


def test_super_is_found_below_decorators():
    found = run(
        "class Base:\n    def step(self): yield 'base'",
        "class Ring(Base): ...",
        "import contextlib\n"
        "class Ring(Ring):\n"
        "    @contextlib.contextmanager\n"
        "    def step(self): yield [*super().step(), 'ring']",
        "with Ring().step() as steps: ...",
    )
    assert found["steps"] == ["base", "ring"]


def test_a_class_that_was_imported_is_not_changed():
    before = dict(vars(nn.Flatten))
    found = run("class Flatten(Flatten):\n    def forward(self, x): return x", Flatten=nn.Flatten)
    assert found["Flatten"] is not nn.Flatten and dict(vars(nn.Flatten)) == before


def test_other_classes_are_left_alone():
    found = run("class A: ...\nfirst = A\nclass B: ...\nclass A(B): ...\nclass C(A, B): ...")
    assert found["A"] is not found["first"] and found["C"].__bases__ == (found["A"], found["B"])
