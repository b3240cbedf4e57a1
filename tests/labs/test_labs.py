"""An unsolved lab runs to its end, fails every check, and says what to do."""

import os

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from instructor import build, contents
from shared.deadlines import scaled
from shared.ranks import reader

pytestmark = pytest.mark.exhaustive

CHAPTERS = build.chapters()


# Deletes what the last lab has left. A kernel and a fork server for each lab would import torch 40 times.
FORGET = """
from shared.ranks import running
from shared.ranks.definitions import Definitions
if (found := running.find()) is not None:
    found.definitions = Definitions()
    found.restart()
get_ipython().reset()
"""


@pytest.fixture(scope="module")
def kernel():
    """Return a kernel for one lab after the other."""
    folder = str(build.ROOT / "labs")
    environment = {**os.environ, reader.EXECUTOR: "1"}
    manager, client = start_new_kernel(startup_timeout=int(scaled(120)), cwd=folder, env=environment)
    client.stop_channels()
    yield manager
    manager.shutdown_kernel()


@pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.name for chapter in CHAPTERS])
def test_an_unsolved_lab_fails_every_check_with_a_helpful_message(chapter, kernel):
    lab = nbformat.read(build.ROOT / contents.notebook("labs", chapter.name), as_version=4)
    lab.cells.insert(0, nbformat.v4.new_code_cell(FORGET))
    NotebookClient(lab, km=kernel, timeout=int(scaled(120)), allow_errors=True).execute()
    assert lab.cells[0].outputs == []
    checks = [cell for cell in lab.cells if "check" in cell.metadata.get("tags", [])]
    assert checks
    for cell in checks:
        text = str(cell.outputs)
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert [error.ename for error in errors] == ["CheckFailed"], f"{cell.source}\n{text}"
        assert "it is not written yet" in text, f"{cell.source}\n{text}"
        assert "not written yet" in errors[0].evalue or "not there yet" in errors[0].evalue  # if some checks pass
        assert not any("framework.py" in line for line in errors[0].traceback)
