"""In a real kernel: who reads a notebook, which version a check judges, and how early or wrong cells are explained."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

from instructor import release
from instructor.build import ROOT
from shared import progress
from shared.checks.engine import attempts
from shared.deadlines import scaled
from shared.jupyter import KERNELSPEC, LANGUAGE_INFO
from shared.progress.page import Page
from shared.ranks import reader
from shared.ranks.diagnosis import CellState

KERNELS = ROOT / "shared" / "jupyter"
START = """
from shared import progress, ranks
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
WRONG = "%%ranks\ndef sum_over_ranks(value): return value"
CHECK = "check.sum_over_ranks()"


@contextlib.contextmanager
def kernel(folder: Path, **environment: str) -> Iterator:
    """Start a kernel for a notebook in this folder. Unlike JupyterLab, it sends no metadata. Yields its client."""
    known = {name: value for name, value in os.environ.items() if name not in ("JPY_SESSION_NAME", reader.EXECUTOR)}
    manager, client = start_new_kernel(startup_timeout=scaled(60), cwd=str(folder), env=known | environment)
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client, code: str) -> list[dict]:
    """Run a cell. Returns the messages that make up its output."""
    shown = []
    client.execute_interactive(code, timeout=scaled(60), output_hook=shown.append)
    return shown


def data_of(shown: list[dict]) -> list[dict]:
    kinds = ("display_data", "execute_result")  # and not the messages of widgets
    return [message["content"]["data"] for message in shown if message["msg_type"] in kinds]


def texts(shown: list[dict]) -> list[str]:
    return [data["text/plain"] for data in data_of(shown)]


# -- the kernel of `make lab`


def test_make_lab_uses_a_kernel_that_knows_ranks_cells_and_describes_itself_as_the_built_notebooks_do(monkeypatch):
    """With another description, opening a notebook would change it: JupyterLab writes the kernel's into it."""
    assert re.search(r"^lab: export JUPYTER_PATH := \$\(CURDIR\)/shared/jupyter", (ROOT / "Makefile").read_text(), re.M)
    spec = json.loads((KERNELS / "kernels" / "python3" / "kernel.json").read_text())
    assert {"display_name": spec["display_name"], "language": spec["language"], "name": "python3"} == KERNELSPEC
    monkeypatch.setenv("JUPYTER_PATH", str(KERNELS))
    with kernel(ROOT / "chapters") as client:
        assert client.kernel_info(reply=True, timeout=scaled(60))["content"]["language_info"] == LANGUAGE_INFO
        shown = run(client, "%%ranks\nprint(rank)")
    (error,) = [message["content"] for message in shown if message["msg_type"] == "error"]
    assert error["ename"] == "RanksError"
    assert error["evalue"].startswith("No ranks are running. In a notebook, run its first cells")


# -- whoever reads a notebook gets progress, widgets and live lines, whatever they read in. A program does not.

LAB = str(ROOT / "labs" / "00_ranks_lab.ipynb")
ELSEWHERE = str(ROOT / "chapters" / "00_ranks.ipynb")
ASK = """
from shared import progress
from shared.ranks import reader
(reader.present(), str(reader.path()), progress.in_a_lab())
"""
A_PROGRAM = f"import os; os.environ[{reader.EXECUTOR!r}] = '1'"
A_READER = f"del os.environ[{reader.EXECUTOR!r}]"
LONG_CHECK = """import time
from shared.checks.engine import display
with display.live() as report:
    report("values · 2 ranks")
    time.sleep(2.5)"""
WIDGET = """
from shared import widgets
widgets.ring_stepper([[{"sent": None, "holds": {"A": "1"}}]])
"""


@pytest.mark.slow
def test_a_program_that_executes_notebooks_is_no_reader():
    with kernel(ROOT / "labs") as client:
        for who, setup, expected in (
            ("a front end that names no notebook, such as Colab", "", (True, "None", True)),
            ("VS Code", f"__vsc_ipynb_file__ = {LAB!r}", (True, LAB, True)),
            ("a lesson", f"import os; os.environ['JPY_SESSION_NAME'] = {ELSEWHERE!r}", (True, ELSEWHERE, False)),
            ("JupyterLab or the classic notebook", f"os.environ['JPY_SESSION_NAME'] = {LAB!r}", (True, LAB, True)),
        ):
            run(client, setup)
            assert texts(run(client, ASK)) == [repr(expected)], who
        shown = run(client, LONG_CHECK)
        first, second, *_ = texts(shown)
        assert first == "checking values · 2 ranks" and second.startswith(f"{first} · 1 s")
        assert shown[-2]["msg_type"] == "clear_output", "nothing of it is left"
        kinds = [sorted(data) for data in data_of(run(client, WIDGET))]
        assert kinds == [["application/vnd.jupyter.widget-view+json", "text/plain"], ["image/png", "text/plain"]]
        run(client, A_PROGRAM)
        assert texts(run(client, ASK)) == [repr((False, LAB, False))]
        assert texts(run(client, LONG_CHECK)) == []
        assert [sorted(data) for data in data_of(run(client, WIDGET))] == [["image/png", "text/plain"]]


def test_a_script_has_no_reader():
    assert not reader.present() and reader.path() is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_checks_in_the_lab_of_a_bundle_appear_on_its_start_page(tmp_path):
    release.write(1, tmp_path)
    folder = tmp_path / "distributed-training-01"
    lab = folder / "labs" / "00_ranks_lab.ipynb"
    with kernel(lab.parent, PYTHONPATH=str(folder), JPY_SESSION_NAME=str(lab)) as client:

        def show(code: str) -> str:
            return "".join(texts(run(client, code)))

        for code in (A_PROGRAM, START, RIGHT):
            run(client, code)
        assert "✓ sum_over_ranks · values" in show(CHECK)
        assert not (folder / "progress.jsonl").exists()  # because a program ran the lab
        for code in (A_READER, WRONG, CHECK):
            run(client, code)
        assert "✗ sum_over_ranks  – global_mean" in show("progress.show()")
        for code in (RIGHT, CHECK):
            run(client, code)
        shown = show("progress.show()")
        assert shown.startswith("Next: global_mean in labs/00_ranks_lab.ipynb.") and "✓ sum_over_ranks" in shown
        assert "1 of 13 exercises" in shown  # those of the two labs in the bundle
        run(client, A_PROGRAM)
        assert show("progress.show()") == Page(progress.ROOT, []).as_text()
    lines = (folder / "progress.jsonl").read_text().split()
    assert lines.count(json.dumps("first_collectives.sum_over_ranks") + ",") == 2


# -- a check does not judge a version that is not on the screen, and names of the other process are explained


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Yields a function that runs code in a kernel and returns what it shows, and the path of its notebook."""
    path = tmp_path_factory.mktemp("labs") / "lab.ipynb"

    def words(client, code: str) -> str:
        contents = [message["content"] for message in run(client, code)]
        found = [part.get("data", {}).get("text/plain") or "\n".join(part.get("traceback", [])) for part in contents]
        return " ".join(" ".join(found).split())

    with kernel(ROOT / "labs", JPY_SESSION_NAME=str(path)) as client:
        run(client, START)
        yield lambda code: words(client, code), path


def save(path: Path, source: str) -> None:
    cells = [nbformat.v4.new_markdown_cell("# Lab"), nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    later = path.stat().st_mtime + 5  # some file systems count whole seconds
    os.utime(path, (later, later))


@pytest.mark.slow
def test_a_check_names_the_cell_and_refuses_one_that_failed_or_was_edited_since(notebook):
    show, path = notebook
    show(RIGHT)
    assert "✓ Exercise 0.1 passed" in (shown := show(CHECK)) and "Judged: the cell that ran as [2]" in shown
    show(BROKEN)
    shown = show(CHECK)
    assert "there is nothing new to check. SyntaxError in line 4: '(' was never closed" in shown
    assert "passed" not in shown
    show(RIGHT)
    save(path, RIGHT)
    assert "✓ Exercise 0.1 passed" in show(CHECK)
    save(path, RIGHT.replace("total.item()", "42.0"))
    shown = show(CHECK)
    assert "You have changed this cell since it ran as [6]. Run it first" in shown and "passed" not in shown
    show(RIGHT.removeprefix("%%ranks"))
    shown = show(CHECK)
    assert "defines sum_over_ranks in the notebook, not on the ranks. Begin the cell with %%ranks" in shown
    assert "passed" not in shown


@pytest.mark.slow
def test_a_name_of_the_other_world_is_explained(notebook):
    show, _ = notebook
    show("%%ranks\ntotal = torch.ones(2)")
    assert "`rank` exists on the ranks, and this cell runs in the notebook. Begin it with %%ranks" in show("rank + 1")
    assert "`ranks.pull('total')` brings its values here" in show("total")
    assert "The first cells of the notebook define `plots`. Run them first." in show("plots")
    assert "exists" not in show("nowhere")
    show("in_notebook = 3")
    shown = show("%%ranks\nprint(in_notebook)")
    assert "`in_notebook` exists in the notebook, not on the ranks. Import or define it in a %%ranks cell." in shown
    assert "exists in" not in show("%%ranks\nprint(nowhere)")


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
