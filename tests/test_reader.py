"""Whoever reads a notebook gets progress, widgets and live lines, whatever they read in. A program does not."""

import os

import pytest
from jupyter_client.manager import start_new_kernel

from instructor import build
from shared.deadlines import scaled
from shared.ranks import reader

LAB = str(build.ROOT / "labs" / "00_ranks_lab.ipynb")
ELSEWHERE = str(build.ROOT / "chapters" / "00_ranks.ipynb")
ASK = """from shared import progress
from shared.ranks import reader
(reader.present(), str(reader.path()), progress.in_a_lab())"""


def answer(setup: str, environment: dict[str, str]) -> str:
    """Return what a bare kernel in labs/ says. Unlike JupyterLab's, its messages have no metadata."""
    known = {name: value for name, value in os.environ.items() if name not in ("JPY_SESSION_NAME", reader.EXECUTOR)}
    folder = str(build.ROOT / "labs")
    manager, client = start_new_kernel(startup_timeout=scaled(60), cwd=folder, env={**known, **environment})
    shown = []
    try:
        for code in (setup, ASK):
            client.execute_interactive(code, timeout=scaled(60), output_hook=shown.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return next(message["content"]["data"]["text/plain"] for message in shown if "data" in message["content"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "environment", "expected"),
    [
        pytest.param("", {"JPY_SESSION_NAME": LAB}, (True, LAB, True), id="JupyterLab or the classic notebook"),
        pytest.param("", {"JPY_SESSION_NAME": ELSEWHERE}, (True, ELSEWHERE, False), id="a lesson"),
        pytest.param(f"__vsc_ipynb_file__ = {LAB!r}", {}, (True, LAB, True), id="VS Code"),
        pytest.param("", {}, (True, "None", True), id="a front end that names no notebook, such as Colab"),
        pytest.param("", {reader.EXECUTOR: "1"}, (False, "None", False), id="a program"),
    ],
)
def test_who_is_a_reader(setup, environment, expected):
    assert answer(setup, environment) == repr(expected)


def test_a_script_has_no_reader():
    assert not reader.present() and reader.path() is None
