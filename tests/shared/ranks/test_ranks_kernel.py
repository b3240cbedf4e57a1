"""Ranks in a real Jupyter kernel: output, interrupts, two notebooks at once, and a killed kernel."""

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field

import psutil
import pytest
from jupyter_client.manager import KernelManager

from shared.deadlines import scaled

pytestmark = pytest.mark.slow

CELL_TIMEOUT_S = scaled(60.0)
GONE_S = scaled(60.0)  # the time in which processes have to end and files have to disappear
ALL_REDUCE = "%%ranks\ntotal = torch.ones(1) * rank\ndist.all_reduce(total)\nprint(total.item())"


@dataclass
class Shown:
    """The output of a cell in the notebook."""

    text: str = ""
    traceback: list[str] = field(default_factory=list)

    @property
    def error(self) -> str:
        return "\n".join(self.traceback)


class Notebook:
    """A kernel and a client that runs cells in it."""

    def __init__(self):
        self.manager = KernelManager(kernel_name="python3", transport="ipc")  # sockets that no other program can take
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=CELL_TIMEOUT_S)

    def run(self, code: str) -> Shown:
        return self.result_of(self.send(code))

    def send(self, code: str) -> str:
        return self.client.execute(code)

    def result_of(self, request: str) -> Shown:
        """Collect the output of a cell until the kernel is idle again."""
        shown = Shown()
        while True:
            message = self.client.get_iopub_msg(timeout=CELL_TIMEOUT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.text += content["text"]
            elif message["msg_type"] == "display_data":
                shown.text += content["data"].get("text/plain", "") + "\n"
            elif message["msg_type"] == "clear_output":  # what a long cell showed while it ran
                shown.text = ""
            elif message["msg_type"] == "error":
                shown.traceback = content["traceback"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return shown

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.pid)

    def close(self) -> None:
        self.client.stop_channels()
        with contextlib.suppress(Exception):  # a test may have killed it
            self.manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def open_notebook():
    notebook = Notebook()
    try:
        yield notebook
    finally:
        notebook.close()


def start_ranks(notebook: Notebook, world_size: int) -> Shown:
    shown = notebook.run(f"from shared import ranks\nranks.start({world_size})")
    assert not shown.traceback, shown.error
    return shown


@pytest.fixture(scope="module")
def notebook():
    """Provide a notebook with four ranks, for the tests that leave them usable."""
    with open_notebook() as opened:
        start_ranks(opened, 4)
        yield opened


def poll_until(happened, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def children_of(notebook: Notebook) -> list[psutil.Process]:
    return notebook.process.children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_dir_of(processes: list[psutil.Process]) -> str:
    """Return the directory of a fork server's files."""
    commands = [process.cmdline() for process in processes]
    return next(command[-1] for command in commands if "shared.ranks.forkserver" in command)


def interrupt_when(notebook: Notebook, ready) -> float:
    """Interrupt the kernel once ready() is true. Returns the time of the interrupt."""
    assert poll_until(ready, CELL_TIMEOUT_S)
    notebook.manager.interrupt_kernel()
    return time.monotonic()


def test_start_shows_each_rank_and_what_can_be_measured(notebook):
    shown = notebook.run("ranks.start(4)")
    rows = re.findall(r"^(\d)\s+this machine\s+(\d+)\s+(\S+)\s+(\S+)$", shown.text, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert {int(row[1]) for row in rows} <= {process.pid for process in children_of(notebook)}
    assert "You can trust" in shown.text
    assert "variables are kept" in shown.text


def test_output_is_merged_in_rank_order(notebook):
    assert notebook.run(ALL_REDUCE).text == "ranks 0–3 │ 6.0\n"
    shown = notebook.run("%%ranks\nprint('rank', rank)\nif rank in (1, 3):\n    print('odd')")
    assert shown.text.splitlines() == [
        "rank 0 │ rank 0",
        "rank 1 │ rank 1",
        "rank 1 │ odd",
        "rank 2 │ rank 2",
        "rank 3 │ rank 3",
        "rank 3 │ odd",
    ]


def test_last_expression_is_shown_as_in_a_notebook(notebook):
    assert notebook.run("%%ranks 0,1\nx = torch.arange(3)\nx * 2").text == "ranks 0, 1 │ tensor([0, 2, 4])\n"
    assert notebook.run("%%ranks 0,1\nx * 2;").text == ""
    assert notebook.run("%%ranks 0,1\nprint('first')\nNone").text == "ranks 0, 1 │ first\n"


def test_failed_cell_shows_only_the_students_lines(notebook):
    shown = notebook.run("%%ranks\nx = torch.ones(2)\nif rank == 1:\n    x.no_such_method()\ndist.barrier()")
    assert "Rank 1 failed: AttributeError" in shown.error
    assert "cell, line 4: x.no_such_method()" in shown.error
    assert_no_course_frames(shown)
    assert notebook.run(ALL_REDUCE).text == "ranks 0–3 │ 6.0\n"


def test_invalid_line_of_the_magic_is_reported_in_one_sentence(notebook):
    shown = notebook.run("%%ranks 7\nprint(1)")
    assert "the ranks are 0 to 3, got 7" in shown.text + shown.error
    assert "rankset.py" not in shown.text + shown.error


def assert_no_course_frames(shown: Shown) -> None:
    for pattern in ("rankset.py", "rankside.py", "magic.py", "instrumentation.py", "Traceback", "site-packages"):
        assert pattern not in shown.error


HANG = """%%ranks
reached = True
if rank == 1:
    while True: pass
dist.barrier()
"""


def test_interrupted_hang_is_explained_and_the_next_cell_works(notebook):
    notebook.run("%%ranks\nmarker = 'kept'")
    busy = rank_is_busy(notebook)
    request = notebook.send(HANG)
    interrupted = interrupt_when(notebook, busy)
    shown = notebook.result_of(request)
    assert time.monotonic() - interrupted < scaled(10)
    assert "Rank 1 is still running: cell, line 4: while True: pass" in shown.error
    assert "your variables on the ranks are kept" in shown.error
    assert_no_course_frames(shown)
    assert notebook.run(ALL_REDUCE).text == "ranks 0–3 │ 6.0\n"
    assert notebook.run("print(ranks.pull('marker'))").text == "['kept', 'kept', 'kept', 'kept']\n"


def rank_is_busy(notebook: Notebook):
    """Return a function that returns whether rank 1's endless loop has used the CPU for a while."""
    rank_1 = psutil.Process(int(notebook.run("print(ranks.current().pids[1])").text))
    before_s = rank_1.cpu_times().user
    return lambda: rank_1.cpu_times().user - before_s > 0.3


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_impatient_second_interrupt_changes_nothing(notebook, pause_s):
    notebook.run("%%ranks\nmarker = 'kept'")
    busy = rank_is_busy(notebook)
    request = notebook.send(HANG)
    interrupt_when(notebook, busy)
    time.sleep(pause_s)  # so that the second interrupt falls into the diagnosis or into the recovery
    notebook.manager.interrupt_kernel()
    assert notebook.result_of(request).traceback
    assert notebook.run(ALL_REDUCE).text == "ranks 0–3 │ 6.0\n"
    assert notebook.run("print(ranks.pull('marker'))").text == "['kept', 'kept', 'kept', 'kept']\n"


@pytest.mark.exhaustive
def test_two_notebooks_run_their_ranks_at_once_without_a_clash(notebook):
    source = "%%ranks\nfor step in range(200):\n    total = torch.ones(1000) * (rank + 1)\n    dist.all_reduce(total)\n"
    with open_notebook() as other:
        start_ranks(other, 2)
        requests = [(nb, nb.send(source + "print(total.unique().tolist())")) for nb in (notebook, other)]
        texts = [nb.result_of(request).text for nb, request in requests]
    assert texts == ["ranks 0–3 │ [10.0]\n", "ranks 0, 1 │ [3.0]\n"]
    assert notebook.run(ALL_REDUCE).text == "ranks 0–3 │ 6.0\n", "closing the other notebook does not affect this one"


@pytest.mark.exhaustive
def test_interrupted_start_leaves_nothing_and_the_next_start_works():
    with open_notebook() as other:
        other.run("from shared import ranks")
        request = other.send("ranks.start(2)")
        interrupt_when(other, lambda: len(children_of(other)) >= 2)
        assert other.result_of(request).traceback
        assert poll_until(lambda: not children_of(other), GONE_S), children_of(other)
        start_ranks(other, 2)
        assert other.run(ALL_REDUCE).text == "ranks 0, 1 │ 1.0\n"


def kill_and_check_that_nothing_is_left(notebook: Notebook, processes: list[psutil.Process]) -> None:
    run_dir = run_dir_of(processes)
    assert os.path.isdir(run_dir)
    notebook.process.kill()
    assert poll_until(lambda: not alive(processes), GONE_S), f"these processes are still alive: {alive(processes)}"
    assert poll_until(lambda: not os.path.exists(run_dir), GONE_S), f"{run_dir} still exists"


def test_killed_kernel_leaves_no_process_and_no_file():
    """One rank is in an endless loop, one has started a process, and the others wait in a collective."""
    with open_notebook() as notebook:
        start_ranks(notebook, 4)
        notebook.run("%%ranks 0\nimport subprocess\nchild = subprocess.Popen(['sleep', '600'])")
        busy = rank_is_busy(notebook)
        notebook.send(HANG)
        assert poll_until(busy, CELL_TIMEOUT_S)
        processes = children_of(notebook)
        assert len(processes) >= 6, "fork server, four ranks, and rank 0's own child"
        kill_and_check_that_nothing_is_left(notebook, processes)


@pytest.mark.exhaustive
def test_kernel_killed_while_ranks_start_leaves_no_process_and_no_file():
    with open_notebook() as notebook:
        notebook.run("from shared import ranks")
        notebook.send("ranks.start(2)")
        assert poll_until(lambda: children_of(notebook), CELL_TIMEOUT_S), "the fork server"
        # The fork server notices this only after it has imported torch, which takes seconds on a busy machine.
        kill_and_check_that_nothing_is_left(notebook, children_of(notebook))


@pytest.mark.exhaustive
def test_kernel_that_is_shut_down_leaves_no_process_and_no_file():
    with open_notebook() as notebook:
        start_ranks(notebook, 1)
        processes = children_of(notebook)
        run_dir = run_dir_of(processes)
        notebook.manager.signal_kernel(signal.SIGTERM)
        notebook.manager.shutdown_kernel()
        assert poll_until(lambda: not alive(processes) and not os.path.exists(run_dir), GONE_S)
