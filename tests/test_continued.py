"""`class Name(Name):` adds methods to a class that an earlier cell has begun."""

import ast

import torch
from torch import nn

from shared.ranks.continued import ContinueClasses


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
