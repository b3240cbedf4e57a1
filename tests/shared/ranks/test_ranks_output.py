"""What C code and subprocesses print on a rank reaches the student, under the rank, after what Python printed."""

import contextlib
import io
import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from shared import ranks
from shared.deadlines import scaled
from shared.ranks import magic, output
from shared.ranks.output import OUTPUT_LIMIT_CHARACTERS, OUTPUT_LIMIT_LINES, Log

PRINTF = "import ctypes\nctypes.CDLL(None).printf(b'%s')"


@pytest.fixture(autouse=True)
def ranks_of_this_test(request):
    if "no_ranks" not in request.fixturenames:
        request.getfixturevalue("two_ranks")


@pytest.fixture
def no_ranks():
    """Start no ranks for this test."""


def shown_by(source: str, capsys, line: str = "") -> list[str]:
    """Run a cell. Returns the lines that it shows."""
    capsys.readouterr()
    with contextlib.suppress(ranks.CellFailed):
        magic.cell(line, source)
    return capsys.readouterr().out.splitlines()


# -- a cell


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.system('echo hi');",
        "import os\nos.write(1, b'hi\\n');",
        "import os\nos.write(2, b'hi');",
        "import subprocess\nsubprocess.run(['echo', 'hi']);",
        "import subprocess\nsubprocess.run('echo hi >&2', shell=True);",
        PRINTF % "hi" + ";",
        "import sys\nprint('hi', file=sys.__stdout__)",
    ],
    ids=["os.system", "os.write", "standard error", "subprocess", "its standard error", "printf", "the first stdout"],
)
def test_what_is_printed_outside_pythons_streams_is_shown_once(source, capsys):
    assert shown_by(source, capsys) == ["ranks 0, 1 │ hi"]
    assert shown_by("pass", capsys) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.system(f'echo rank {rank}');", ["rank 0 │ rank 0", "rank 1 │ rank 1"]),
        (
            "import os\nos.system('echo outside')\nprint('printed', end='')\n6 * 7",
            ["ranks 0, 1 │ printed", "ranks 0, 1 │ outside", "ranks 0, 1 │ 42"],
        ),
        (r"import os; os.write(1, 'é'.encode() + b'\xff\n');", ["ranks 0, 1 │ é\N{REPLACEMENT CHARACTER}"]),
    ],
    ids=["under its rank", "after what Python printed, and before the last value", "not UTF-8"],
)
def test_it_is_shown_in_its_place(source, lines, capsys):
    assert shown_by(source, capsys) == lines


def test_a_function_that_runs_on_every_rank_shows_it_too(capsys):
    def greet():
        print("odd" if dist.get_rank() else "even")
        return os.system("echo hi")

    assert ranks.run(greet) == [0, 0]
    assert capsys.readouterr().out == "rank 0 │ even\nrank 0 │ hi\nrank 1 │ odd\nrank 1 │ hi\n"


def test_long_output_is_shortened_as_printed_text_is(capsys):
    *lines, note = shown_by("import os\nos.system('seq 1000');", capsys)
    assert lines == [f"ranks 0, 1 │ {number}" for number in range(1, OUTPUT_LIMIT_LINES + 1)]
    assert note == "ranks 0, 1 │ … 800 more lines not shown"
    line, note = shown_by("import os\nos.write(1, b'x' * 10**6);", capsys, "0")
    assert len(line.removeprefix("rank 0 │ ")) == OUTPUT_LIMIT_CHARACTERS
    assert note == f"rank 0 │ … {10**6 - OUTPUT_LIMIT_CHARACTERS} more characters not shown"


def test_a_message_of_torchs_own_code_is_shown_without_what_differs_between_ranks(capsys):
    source = """
import os
message = f"[rank{rank}]:[W1127 20:05:53.69{rank}739102 Module.cpp:12{rank}] Warning: something is slow (function f)\\n"
os.write(2, message.encode());
"""
    assert shown_by(source, capsys) == ["ranks 0, 1 │ Warning: something is slow (function f)"]


def test_messages_about_connections_and_false_alarms_of_ddp_are_left_out(capsys):
    written = """
before
[W1127 20:05:53.690739102 socket.cpp:752] [c10d] The client socket cannot be initialized to connect to [localhost]:1
[rank1]:[W1127 20:05:53.690739102 ProcessGroupGloo.cpp:749] Warning: Unable to resolve hostname to a (local) address. U
[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
after
"""
    source = f"import os\nos.write(1, {written.strip().encode()!r})\nif rank == 1: print('printed')"
    assert shown_by(source, capsys, "1") == ["rank 1 │ printed", "rank 1 │ before", "rank 1 │ after"]
    ddp = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(1, 1), find_unused_parameters=True)
model(torch.ones(1)).backward()
"""
    assert shown_by(ddp, capsys) == []


def test_a_cell_that_has_closed_or_moved_its_standard_output_still_ends(capsys):
    assert shown_by("import os\nkept = os.dup(1)\nos.close(1)\nprint('printed')", capsys) == ["ranks 0, 1 │ printed"]
    assert shown_by("os.open('/dev/null', os.O_WRONLY)\nos.write(1, b'hi')", capsys) == ["ranks 0, 1 │ 2"]
    assert shown_by("os.dup2(kept, 1);", capsys) == []
    assert shown_by("os.system('echo hi');", capsys) == ["ranks 0, 1 │ hi"]


# -- between cells


LATER = "import subprocess\nsubprocess.Popen('sleep 0.3; echo NCCL INFO', shell=True);"


def written_later(capsys) -> list[str]:
    """Let a program write between two cells. Returns what the second cell shows."""
    shown_by(LATER, capsys)
    time.sleep(scaled(0.8))
    return shown_by("print('next')", capsys)


def test_what_is_written_between_cells_is_not_shown(capsys):
    assert written_later(capsys) == ["ranks 0, 1 │ next"]


def test_with_nccl_debug_the_next_cell_shows_it(capsys):
    shown_by("import os\nos.environ['NCCL_DEBUG'] = 'INFO'", capsys)
    assert written_later(capsys) == ["ranks 0, 1 │ next", "ranks 0, 1 │ NCCL INFO"]
    shown_by("del os.environ['NCCL_DEBUG']", capsys)


@pytest.mark.slow
def test_with_nccl_debug_the_first_cell_shows_what_was_written_while_the_group_formed(no_ranks, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    ranks.stop()
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(2)
    assert shown_by("print('first')", capsys) == ["ranks 0, 1 │ first"], "the rank's own log stays out of cells"
    ranks.stop()


# -- cells that are stopped, and ranks that die


@pytest.mark.slow
def test_what_a_stopped_cell_wrote_before_and_not_after_is_shown(capsys):
    source = """
import os, time
os.write(1, b"before\\n")
try:
    time.sleep(60)
finally:
    os.write(1, b"after\\n")
"""
    assert shown_by(source, capsys, f"--timeout {scaled(1):g}") == ["ranks 0, 1 │ before"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.abort()", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_the_last_words_of_a_rank_that_dies_are_shown(end, capsys):
    source = (
        f"import os\nif rank == 1:\n    {(PRINTF % 'last words').replace(chr(10), '; ')}\n    {end}\ndist.barrier()"
    )
    assert shown_by(source, capsys) == ["rank 1 │ last words"]
    assert shown_by("pass", capsys) == []


@pytest.mark.slow
def test_a_program_that_prints_endlessly_fills_neither_the_memory_nor_the_disk(capsys):
    began = time.monotonic()
    *lines, cut, rest = shown_by("import os\nos.system('yes')", capsys, f"0 --timeout {scaled(2):g}")
    assert lines == ["rank 0 │ y"] * OUTPUT_LIMIT_LINES
    assert "more lines not shown" in cut and rest == "rank 0 │ … and more, which was not read"
    assert time.monotonic() - began < scaled(20)


# -- the log


@contextlib.contextmanager
def descriptor_1_leads_to(path):
    before = os.dup(1)
    with open(path, "a+b") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def test_a_log_is_deleted_only_beyond_what_is_read(no_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_MOST_READ_BYTES", 10)
    log, path = Log(), tmp_path / "log"
    with descriptor_1_leads_to(path):
        log.cell_begins()
        os.write(1, b"123456789\n")
        log.limit()
        assert log.cell_ends() == "123456789\n"
        log.cell_begins()
        os.write(1, b"a\n" * 50)
        log.limit()
        assert log.cell_ends() == "a\n" * 5 + "… and more, which was not read\n"
    assert path.stat().st_size == 10 + 11


def test_a_log_that_was_emptied_shows_nothing(no_ranks, tmp_path):
    log = Log()
    with descriptor_1_leads_to(tmp_path / "log"):
        os.write(1, b"before")
        log.cell_begins()
        os.truncate(tmp_path / "log", 0)
        assert log.cell_ends() == ""


def test_a_pipe_is_not_read(no_ranks):
    program = (
        "from shared.ranks.output import Log\nlog = Log()\nlog.attach()\nlog.cell_begins()\nprint([log.cell_ends()])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "['']\n"


def test_a_cell_costs_less_than_a_tenth_of_a_millisecond_more():
    def cost_s() -> float:
        import timeit

        from shared.ranks.output import log

        return min(timeit.repeat("log.cell_begins(); log.cell_ends()", globals={"log": log}, number=100)) / 100

    assert max(ranks.run(cost_s)) < 1e-4
