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


LONG_CHECK = """import time
from shared.checks.engine import display
with display.live() as report:
    report("values · 2 ranks")
    time.sleep(2.5)"""


def messages(environment: dict[str, str], *cells: str) -> list[dict]:
    """Return what a bare kernel in labs/ sends while it runs the cells. Unlike JupyterLab's, it has no metadata."""
    known = {name: value for name, value in os.environ.items() if name not in ("JPY_SESSION_NAME", reader.EXECUTOR)}
    folder = str(build.ROOT / "labs")
    manager, client = start_new_kernel(startup_timeout=scaled(60), cwd=folder, env={**known, **environment})
    shown = []
    try:
        for code in cells:
            client.execute_interactive(code, timeout=scaled(60), output_hook=shown.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return shown


def texts(shown: list[dict]) -> list[str]:
    return [message["content"]["data"]["text/plain"] for message in shown if "data" in message["content"]]


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
    assert texts(messages(environment, setup, ASK)) == [repr(expected)]


@pytest.mark.slow
def test_a_long_check_shows_for_how_long_it_has_been_running():
    shown = messages({}, LONG_CHECK)
    first, second, *_ = texts(shown)
    assert first == "checking values · 2 ranks" and second.startswith(f"{first} · 1 s")
    assert shown[-2]["msg_type"] == "clear_output", "nothing of it is left"
    assert texts(messages({reader.EXECUTOR: "1"}, LONG_CHECK)) == []


def test_a_script_has_no_reader():
    assert not reader.present() and reader.path() is None
