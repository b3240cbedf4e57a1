"""Run `make lab` on a copy of the course, as for a newcomer who has never used Jupyter.

The copy contains the files that git tracks, so that saving a notebook changes nothing here. The server, kernels, ranks
and browser have a mark in their environment, by which `processes` finds those that are still running.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from shared.deadlines import SCALE, scaled, time_scale

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = scaled(60.0)  # for one wait; generous, because other tests may use the cores
MARK = "COURSE_BROWSER_TEST"


def wait_until(
    event: str,
    condition: Callable[[], object],
    wait: Callable[[float], None] = time.sleep,
    deadline_s: float = DEADLINE_S,
):
    """Call `condition` until its result is true, and return the result.

    Args:
        event: Describes the condition in the past tense, for the error.

    Raises:
        TimeoutError: if the condition was not true by the deadline.
    """
    ends = time.monotonic() + deadline_s
    while not (answer := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(f"waited {deadline_s:g} s in vain until {event}")
        wait(0.1)
    return answer


def copy_course(folder: Path) -> Path:
    """Copy the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def newcomers_environment(course: Path, home: Path, mark: str) -> dict[str, str]:
    """Return the environment of somebody who has never used Jupyter, with this Python's packages and the copy."""
    ours = ("PYTEST_", "JUPYTER", "JPY_", "MAKE", "MFLAGS", "COURSE_", "RANKS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    own = {name: str(home / name.lower()) for name in folders}
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    return kept | own | {SCALE: f"{time_scale():g}", "PATH": path, "PYTHONPATH": str(course), MARK: mark}


@contextlib.contextmanager
def make_lab(course: Path, environment: dict[str, str], log: Path) -> Iterator[str]:
    """Run `make lab` in a copy of the course with this Python. Yields the address for a browser."""
    command = ["make", "lab", f"COURSE_PYTHON={sys.executable}", "LAB_ARGS=--no-browser --ip=127.0.0.1"]
    options = {"cwd": course, "env": environment, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)

    def address() -> str | None:
        assert server.poll() is None, f"`make lab` ended by itself:\n{log.read_text()[-3000:]}"
        found = re.search(r"http://127\.0\.0\.1:\S+token=\w+", log.read_text())
        return found and found.group()

    try:
        yield wait_until("`make lab` printed an address", address)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:  # Then its processes are found by their mark.
            server.kill()


def processes(mark: str) -> list[psutil.Process]:
    """Return all processes with this mark, no matter who started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def nothing_left(deadline_s: float = scaled(20.0)) -> Iterator[str]:
    """Yield a new mark. At the end of the block, fail if processes with it are still running, and kill them."""
    mark = uuid.uuid4().hex
    try:
        yield mark
    finally:
        with contextlib.suppress(TimeoutError):
            wait_until("all processes ended", lambda: not processes(mark), deadline_s=deadline_s)
        left = processes(mark)
        names = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        assert not left, f"still running {deadline_s:g} s after the server's end: {names}"
