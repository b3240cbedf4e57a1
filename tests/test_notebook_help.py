"""A check does not judge a version that is not on the screen, and names of the other process are explained."""

import os
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

from instructor import build
from shared.checks.engine import attempts
from shared.deadlines import scaled
from shared.ranks.diagnosis import CellState

START = """
from shared import ranks
from shared.checks import first_collectives as check
ranks.start(world_size=2)
"""
RIGHT = """%%ranks
def sum_over_ranks(value):
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
"""
BROKEN = RIGHT.replace("all_reduce(total)", "all_reduce(total")
CHECK = "check.sum_over_ranks()"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Yields a function that runs code in a kernel and returns what it shows, and the path of its notebook."""
    path = tmp_path_factory.mktemp("labs") / "lab.ipynb"
    environment = {**os.environ, "JPY_SESSION_NAME": str(path)}
    environment.pop("COURSE_EXECUTOR", None)
    manager, client = start_new_kernel(startup_timeout=scaled(60), cwd=str(build.ROOT / "labs"), env=environment)

    def run(code: str) -> str:
        shown = []
        client.execute_interactive(code, timeout=scaled(60), output_hook=shown.append)
        contents = [message["content"] for message in shown]
        texts = [part.get("data", {}).get("text/plain") or "\n".join(part.get("traceback", [])) for part in contents]
        return " ".join(" ".join(texts).split())

    try:
        run(START)
        yield run, path
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def save(path, source: str) -> None:
    cells = [nbformat.v4.new_markdown_cell("# Lab"), nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    later = path.stat().st_mtime + 5  # some file systems count whole seconds
    os.utime(path, (later, later))


@pytest.mark.slow
def test_a_check_names_the_cell_and_refuses_one_that_failed_or_was_edited_since(notebook):
    run, path = notebook
    run(RIGHT)
    assert "✓ Exercise 0.1 passed" in (shown := run(CHECK)) and "Judged: the cell that ran as [2]" in shown
    run(BROKEN)
    shown = run(CHECK)
    assert "there is nothing new to check. SyntaxError in line 4: '(' was never closed" in shown
    assert "passed" not in shown
    run(RIGHT)
    save(path, RIGHT)
    assert "✓ Exercise 0.1 passed" in run(CHECK)
    save(path, RIGHT.replace("total.item()", "42.0"))
    shown = run(CHECK)
    assert "You have changed this cell since it ran as [6]. Run it first" in shown and "passed" not in shown
    run(RIGHT.removeprefix("%%ranks"))
    shown = run(CHECK)
    assert "defines sum_over_ranks in the notebook, not on the ranks. Begin the cell with %%ranks" in shown
    assert "passed" not in shown


@pytest.mark.parametrize(
    ("positions", "interrupted", "endless"),
    [
        ({0: {"busy": False}, 1: {"busy": True}}, False, True),  # rank 0 computes
        ({0: {"busy": True}, 1: {"busy": True}}, False, False),  # both wait in a collective
        ({0: {"busy": True}, 1: None}, True, True),
    ],
)
def test_code_that_never_ends_or_was_stopped_is_not_tried_again(positions, interrupted, endless):
    """Each further check would take until its deadline, too: 41 s instead of 20."""
    cell = CellState([0, 1], {}, positions, interrupted=interrupted)
    assert attempts._is_endless(SimpleNamespace(cell=cell)) == endless


@pytest.mark.slow
def test_a_name_of_the_other_world_is_explained(notebook):
    run, _ = notebook
    run("%%ranks\ntotal = torch.ones(2)")
    assert "`rank` exists on the ranks, and this cell runs in the notebook. Begin it with %%ranks" in run("rank + 1")
    assert "`ranks.pull('total')` brings its values here" in run("total")
    assert "The first cells of the notebook define `plots`. Run them first." in run("plots")
    assert "exists" not in run("nowhere")
    run("in_notebook = 3")
    shown = run("%%ranks\nprint(in_notebook)")
    assert "`in_notebook` exists in the notebook, not on the ranks. Import or define it in a %%ranks cell." in shown
    assert "exists in" not in run("%%ranks\nprint(nowhere)")
