"""A program that started ranks leaves no processes and no files behind, no matter how it ends."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import pytest

from shared.deadlines import scaled

pytestmark = pytest.mark.slow

REPORT = """
import json, sys, psutil
from shared import ranks

def report():
    children = psutil.Process().children(recursive=True)
    print(json.dumps([[child.pid, child.create_time(), child.cmdline()] for child in children]), flush=True)
"""
START = REPORT + "ranks.start(2)\nreport()\n"


@dataclass(frozen=True)
class Ended:
    """A program that started ranks and has ended."""

    status: int
    error: str
    left: list[psutil.Process]  # processes from its reports that are still running
    run_dirs: set[str]


def run_program(source: str) -> Ended:
    """Run a program that reports its processes, and wait for them to end."""
    program = [sys.executable, "-c", source]
    ended = subprocess.run(program, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[[")]
    assert lines, f"the program reported no processes\n{ended.stdout}\n{ended.stderr}"
    reported = [process for line in lines for process in json.loads(line)]
    assert len(reported) >= 3, "expected a fork server and two ranks"
    run_dirs = {command[-1] for _, _, command in reported if "shared.ranks.forkserver" in command}
    deadline = time.monotonic() + scaled(60.0)
    while (left := still_running(reported)) or any(map(os.path.exists, run_dirs)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return Ended(ended.returncode, ended.stderr, left, run_dirs)


def still_running(reported: list) -> list[psutil.Process]:
    left = []
    for pid, created_s, _command in reported:
        try:
            process = psutil.Process(pid)
            if process.create_time() == created_s and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except psutil.NoSuchProcess:
            continue
    return left


def assert_nothing_left(ended: Ended) -> None:
    assert not ended.left
    assert ended.run_dirs and not any(map(os.path.exists, ended.run_dirs))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("import os; os._exit(7)", 7),
        ("ranks.run(lambda: 1 / 0)", 1),
    ],
    ids=["normally", "without cleaning up", "with a failure on the ranks"],
)
def test_program_leaves_nothing_behind(ending, status):
    ended = run_program(START + ending)
    assert ended.status == status, ended.error
    assert_nothing_left(ended)


def test_stop_leaves_nothing_behind_and_the_program_continues():
    source = START + (
        "import os\n"
        "gone = psutil.Process().children(recursive=True)\n"
        "ranks.stop()\n"
        "ranks.stop()  # harmless\n"
        "gone = [p for p in gone if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]\n"
        "sys.exit(repr(gone) if gone else 0)\n"
    )
    ended = run_program(source)
    assert ended.status == 0, ended.error
    assert_nothing_left(ended)


def test_a_dead_fork_server_is_reported_and_ranks_can_be_started_again():
    """The message says how to continue."""
    source = START + (
        "import time\n"
        "psutil.Process(ranks.current()._server._process.pid).kill()\n"
        "while ranks.current().whole: time.sleep(0.01)\n"
        "try:\n"
        "    ranks.pull('rank')\n"
        "except ranks.RanksError as error:\n"
        "    assert 'ranks.start(world_size=2)' in str(error), error\n"
        "else:\n"
        "    sys.exit('no error after the end of the fork server')\n"
        "ranks.start(2)\n"
        "report()\n"
        "assert ranks.pull('rank') == [0, 1]\n"
    )
    ended = run_program(source)
    assert ended.status == 0, ended.error
    assert_nothing_left(ended)


INTERRUPTED_IMPORT = """
import os, signal, sys
from shared.ranks import devices

class InterruptImport:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":  # at this point, torch's C++ library is loaded, and torch itself is not
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, InterruptImport())
try:
    devices.place(2)
except KeyboardInterrupt:
    print("interrupted")
print(devices.place(2, "gloo:cpu").devices)
"""


def test_interrupt_never_leaves_torch_half_imported():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert done.stdout == "interrupted\n('cpu', 'cpu')\n", done.stderr[-2000:]
