"""The kernel of `make lab` knows `%%ranks` before a notebook's first cell has run."""

import json
import re

import pytest
from jupyter_client.manager import start_new_kernel

from instructor.build import ROOT
from shared.deadlines import scaled
from shared.jupyter import KERNELSPEC, LANGUAGE_INFO

KERNELS = ROOT / "shared" / "jupyter"


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(KERNELS))
    manager, client = start_new_kernel(startup_timeout=scaled(60), cwd=str(ROOT / "chapters"))
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_ranks_cell_that_runs_too_early_says_what_to_do(kernel):
    reply = kernel.execute_interactive("%%ranks\nprint(rank)", timeout=scaled(60), output_hook=lambda _: None)
    assert reply["content"]["ename"] == "RanksError"
    assert reply["content"]["evalue"].startswith("No ranks are running. In a notebook, run its first cells")


def test_make_lab_uses_the_kernel():
    assert re.search(r"^lab: export JUPYTER_PATH := \$\(CURDIR\)/shared/jupyter", (ROOT / "Makefile").read_text(), re.M)


def test_the_kernel_describes_itself_as_the_built_notebooks_do(kernel):
    """Otherwise, opening a notebook would change it: JupyterLab writes both descriptions into it."""
    spec = json.loads((KERNELS / "kernels" / "python3" / "kernel.json").read_text())
    assert {"display_name": spec["display_name"], "language": spec["language"], "name": "python3"} == KERNELSPEC
    assert kernel.kernel_info(reply=True, timeout=scaled(60))["content"]["language_info"] == LANGUAGE_INFO
