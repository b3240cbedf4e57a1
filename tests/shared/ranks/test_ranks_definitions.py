"""After the ranks had to be restarted, what the student's cells define is there again."""

import os

import pytest

from shared import ranks
from shared.checks.engine.framework import CheckFailed, Exercise
from shared.deadlines import scaled
from shared.ranks import magic, rankset
from shared.ranks.definitions import Definitions

pytestmark = pytest.mark.slow  # the ranks are restarted, or hang until a deadline


def restored(*cells: str) -> list[set[str]]:
    """Return the names that would be defined again, cell by cell."""
    definitions = Definitions()
    for source in cells:
        definitions.remember(source, None)
    return [set().union(*cell.names.values()) for cell in definitions.cells]


def test_imports_functions_classes_and_simple_assignments_are_definitions():
    cell = (
        "import math\nfrom torch import Tensor\nSIZE: int = 3 * 4\nleft = (rank - 1) % world_size\nf = lambda x: g(x)\n"
    )
    assert restored(cell + "@torch.no_grad()\ndef step(): ...\nclass Ring: ...") == [
        {"math", "Tensor", "SIZE", "left", "f", "step", "Ring"}
    ]


@pytest.mark.parametrize(
    "cell",
    [
        "x = torch.ones(3)",
        "x = loss * 2",
        "x += 1",
        "for x in (1, 2): pass",
        "print(3)",
        "x.y = 3",
        "def f(:",
        "%time 1",
    ],
)
def test_what_calls_or_depends_on_computed_values_is_no_definition(cell):
    assert restored(cell) == []


def test_only_the_latest_definition_of_a_name_counts():
    assert restored("def f(): ...\ndef g(): ...", "def f(): 1 / 0\nf()") == [{"g"}, {"f"}]
    assert restored("def f(): ...\nSIZE = 3", "f = torch.compile(f)\nSIZE += 1") == [set()]


def test_a_class_that_continues_an_earlier_one_needs_both():
    """Labs split a long class over several cells."""
    both = "class Ring: ...", "class Ring(Ring):\n    def step(self): ..."
    assert restored(*both) == [{"Ring"}, {"Ring"}]
    assert restored(*both, "class Ring: ...") == [{"Ring"}]
    assert restored(*both, both[1]) == [{"Ring"}, {"Ring"}]
    assert restored(*both, "class Ring(Ring):\n    def send(self): ...") == [{"Ring"}] * 3


def run_cell(source: str, line: str = "") -> None:
    magic.cell(line, source)


def failure_of(source: str) -> str:
    with pytest.raises(ranks.CellFailed) as caught:
        run_cell(source)
    assert caught.value.restarted
    return str(caught.value)


CRASH = "import os\nif rank == 1: os._exit(5)"


@pytest.fixture
def fresh_ranks(request):
    ranks.stop()
    yield request.getfixturevalue("two_ranks")
    ranks.stop()


def test_definitions_run_again_after_a_restart_and_the_message_says_so(fresh_ranks):
    run_cell("from torch import Tensor\nSIZE = 3")
    run_cell("def mine(x: Tensor) -> Tensor:\n    return x + SIZE\n\nmodel = torch.ones(2)\nwhere = mine(model)")
    run_cell("here = rank", "1")
    message = failure_of(CRASH)
    assert message.endswith(
        "The ranks had to be restarted. Your definitions were run again: SIZE, mine, here. Computed variables are "
        "gone: model, where. Run the cells that compute them again."
    )
    run_cell("value = mine(torch.zeros(1)).item(), 'here' in globals(), 'model' in globals()")
    assert ranks.pull("value") == [(3.0, False, False), (3.0, True, False)]
    run_cell("import inspect\nsource = inspect.getsource(mine), inspect.getsourcelines(mine)[1]")
    assert ranks.pull("source")[0][1] == 2  # below the line of %%ranks


def test_a_cell_that_continues_a_class_can_run_twice(fresh_ranks):
    run_cell("class Base:\n    def step(self): return ['base']")
    run_cell("class Ring(Base): ...")
    run_cell("ring = Ring()")
    continuing = "class Ring(Ring):\n    def step(self): return [*super().step(), 'ring']\nsteps = ring.step()"
    for _ in range(2):
        run_cell(continuing)
        assert ranks.pull("steps") == [["base", "ring"]] * 2
    failure_of(CRASH)
    run_cell("steps = Ring().step()")
    assert ranks.pull("steps") == [["base", "ring"]] * 2


def test_a_definition_that_was_replaced_may_be_needed_by_an_earlier_cell(fresh_ranks):
    run_cell("class Base: ...")
    run_cell("class Ring(Base): ...")
    run_cell("class Base: size = 4")
    failure_of(CRASH)
    run_cell("size = Ring.size")
    assert ranks.pull("size") == [4, 4]


def test_a_cell_that_cannot_run_again_is_named(fresh_ranks):
    run_cell("model = torch.ones(2)")
    run_cell("def loss(x, weight=model): ...")
    message = failure_of(CRASH)
    what = "The cell that defines loss failed when it was run again, so run it yourself: NameError: name 'model'"
    assert what in message
    run_cell("model = torch.ones(2)\ndef loss(x, weight=model): ...")


def test_a_check_that_had_to_restart_the_ranks_says_below_its_headline_what_is_left(fresh_ranks, capsys):
    crash = Exercise("9.9", "crash")
    crash.check("values", world_sizes=(2,))(lambda attempt: attempt.run(lambda piece: piece()))
    run_cell("import os\ndef crash(): os._exit(5)")
    with pytest.raises(CheckFailed):
        crash()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "The ranks had to be restarted. Your definitions were run again: crash."
    run_cell("kept = callable(crash)")
    assert ranks.pull("kept") == [True] * 2


@pytest.mark.exhaustive
def test_a_definition_that_ends_its_process_is_not_run_a_second_time(fresh_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(rankset, "_DEFINE_TIMEOUT_S", scaled(2.0))
    run_cell(f"class Once:\n    import os\n    os.path.exists({str(tmp_path / 'ran')!r}) and os._exit(3)")
    os.mkdir(tmp_path / "ran")
    assert "The cell that defines Once failed when it was run again, so run it yourself" in failure_of(CRASH)
    run_cell("total = torch.ones(1)\ndist.all_reduce(total)")
