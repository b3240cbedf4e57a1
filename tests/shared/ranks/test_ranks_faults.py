"""Whatever a student does to the ranks, the message explains it and the next cell works.

Every fault is a real one. The same four ranks get one fault after another and must recover from each.
"""

import contextlib
import io
import os
import re
import signal
import textwrap
import time
from dataclasses import dataclass, replace

import psutil
import pytest
import torch
import torch.distributed as dist

from shared import ranks
from shared.checks.engine.framework import CheckFailed, Exercise
from shared.deadlines import scaled
from shared.ranks import magic, running
from shared.wire import sizes

pytestmark = pytest.mark.slow  # the ranks are restarted, or hang until a deadline

SOON_S = scaled(25.0)  # a deadlock is detected long before the deadline of 60 s


@dataclass(frozen=True)
class Failure:
    """What a student sees of a failed cell."""

    message: str
    seconds: float

    @property
    def lead(self) -> str:
        """The sentences before the table of ranks."""
        return self.message.split("\n\n")[0]


def run_cell(source: str, line: str = "") -> None:
    """Run a cell on the ranks. As in a notebook, the %%ranks line is line 1 of the cell."""
    magic.cell(line, textwrap.dedent(source).strip())


def failure_of(source: str, line: str = "") -> Failure:
    began = time.monotonic()
    with pytest.raises(ranks.CellFailed) as caught:
        run_cell(source, line)
    return Failure(str(caught.value), time.monotonic() - began)


def timeout_line(seconds: float) -> str:
    """Return the rest of a %%ranks line with this deadline, or a longer one if the machine is busy."""
    return f"--timeout {scaled(seconds):g}"


def call_failure(fn, *args) -> str:
    with pytest.raises(ranks.RanksError) as caught:
        fn(*args)
    return str(caught.value)


def assert_next_cell_works(world_size: int = 4) -> None:
    run_cell("total = torch.ones(1) * rank\ndist.all_reduce(total)")
    assert [value.item() for value in ranks.pull("total")] == [sum(range(world_size))] * world_size


def assert_recovered(message: str, *, kept: bool) -> None:
    """Check that the next cell works, and that the variables are kept or gone as the message says."""
    assert_next_cell_works()
    assert ("your variables on the ranks are kept" in message.lower()) == kept
    assert ("ariables are gone" in message) == (not kept)
    run_cell("has_marker = 'marker' in globals()")
    assert ranks.pull("has_marker") == [kept] * 4


def assert_recovers_soon(failure: Failure, *, kept: bool = True) -> None:
    assert failure.seconds < SOON_S
    assert_recovered(failure.message, kept=kept)


@pytest.fixture(autouse=True)
def marked_ranks(request):
    """Provide four ranks that hold a variable from before the fault."""
    if not {"no_ranks", "two_ranks"} & set(request.fixturenames):
        request.getfixturevalue("four_ranks")
        run_cell("marker = str('from before the fault')")  # a call, so that no restart defines it again


@pytest.fixture
def no_ranks(monkeypatch):
    """Pretend that ranks.start has not been called yet."""
    monkeypatch.setattr(running, "_current", None)


# -- ranks that wait for each other


def test_rank_that_never_joins_is_named_with_its_last_collective():
    failure = failure_of(
        """
        dist.barrier()
        if rank != 2:
            dist.all_reduce(torch.ones(5))
        """
    )
    assert re.match(r"Ranks 0, 1, 3 wait in all_reduce #\d+ \(float32, 5 elements\) for rank 2\.", failure.message)
    assert "Rank 2 left the cell after barrier #" in failure.lead
    assert "launched at cell, line 2: dist.barrier()" in failure.lead
    assert "cell, line 4: dist.all_reduce(torch.ones(5))" in failure.message
    assert_recovers_soon(failure)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "dist.broadcast(torch.ones(3), src=0) if rank == 2 else dist.all_reduce(torch.ones(3))",
            ("ranks 0, 1, 3: all_reduce", "rank 2: broadcast", "in the same order"),
        ),
        (
            "dist.all_reduce(torch.ones(3 + (rank == 1)))",
            (r"rank 1: all_reduce .*float32, 4 el", r"ranks 0, 2, 3: all_reduce .*float32, 3 el", "same shapes"),
        ),
        (
            "dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32))",
            (r"rank 1: all_reduce .*float64, 3 el", r"ranks 0, 2, 3: all_reduce .*float32, 3 el", "same shapes"),
        ),
        (
            "dist.broadcast(torch.ones(3), src=0 if rank < 2 else 1)",
            (r"ranks 0, 1: broadcast #\d+ from rank 0 ", r"ranks 2, 3: broadcast #\d+ from rank 1 "),
        ),
    ],
    ids=["operation", "shape", "dtype", "root"],
)
def test_different_collectives_are_named_with_their_ranks(call, expected):
    failure = failure_of(call)
    assert all(re.search(part, failure.message) for part in ("do not agree", *expected)), failure.message
    assert_recovers_soon(failure)


def test_point_to_point_operations_between_some_ranks_are_no_mismatch():
    """torch's own check reports a mismatch at the next collective, because gloo counts sends in the sequence."""
    run_cell(
        """
        if rank == 0:
            dist.send(torch.ones(1), dst=1)
        if rank == 1:
            dist.recv(torch.ones(1), src=0)
        dist.barrier()
        """
    )
    assert_next_cell_works()


def test_ring_of_receives_is_detected_as_a_deadlock():
    failure = failure_of("dist.recv(torch.ones(1), src=(rank + 1) % world_size)")
    for rank in range(4):
        assert re.search(rf"Rank {rank} waits in recv #\d+ from rank {(rank + 1) % 4}", failure.message)
    assert "none of them can continue" in failure.message
    assert_recovers_soon(failure)


def test_gloo_is_not_given_a_tensor_that_it_cannot_send():
    """gloo reads a tensor's address, wherever that is. A meta tensor stands in for one on a GPU."""
    for call in ("dist.send(tensor, dst=(rank + 1) % world_size)", "dist.irecv(tensor, src=(rank + 1) % world_size)"):
        failure = failure_of(f"tensor = torch.ones(3, device='meta')\n{call}")
        assert re.search(r"Ranks 0–3 failed: RuntimeError: gloo cannot (send|recv) a tensor on meta", failure.message)
        assert "backend='gloo:cpu', or with backend='nccl:shared' if NCCL is 2.30 or later" in failure.message
    assert_recovers_soon(failure)


def test_a_transfer_to_oneself_is_rejected_with_gloo():
    for call, what in (("dist.isend(tensor, dst=rank)", "send to"), ("dist.recv(tensor, src=rank)", "receive from")):
        failure = failure_of(f"tensor = torch.ones(3)\n{call}")
        assert re.search(rf"Ranks 0–3 failed: ValueError: Invalid .* a rank cannot {what} itself", failure.message)
    assert_recovers_soon(failure)


def test_backward_that_one_rank_skips_is_detected_as_a_deadlock():
    failure = failure_of(
        """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if rank != 3:
            loss.backward()
        """
    )
    assert re.search(r"Ranks 0–2 wait in all_reduce #\d+ \(float32, 6 elements\) for rank 3", failure.message)
    assert "cell, line 5: loss.backward()" in failure.message
    assert_recovers_soon(failure)


def test_receive_without_a_send_names_the_sender():
    failure = failure_of(
        """
        if rank == 3:
            dist.recv(torch.ones(1), src=1)
        """
    )
    assert re.match(r"Rank 3 waits in recv #\d+ from rank 1", failure.message)
    assert re.search(
        r"Rank 1 left the cell .*(never launched the matching send|without launching any)", failure.message
    )
    assert_recovers_soon(failure)


def test_a_wait_for_an_earlier_transfer_is_named_and_detected_as_a_deadlock():
    failure = failure_of(
        """
        if rank == 0:
            receives = dist.irecv(torch.empty(3), 1)
            sends = dist.isend(torch.ones(2), 1)
            receives.wait()
        if rank == 1:
            dist.recv(torch.empty(2), 0)
        """
    )
    assert re.match(r"Rank 0 waits in recv #\d+ from rank 1 \(float32, 3 elements\)", failure.message)
    assert "Rank 1 left the cell" in failure.message
    assert failure.seconds < SOON_S
    assert_recovered(failure.message, kept=True)


def test_rank_that_was_not_asked_to_run_the_cell_is_named():
    failure = failure_of("dist.barrier()", "0,2")
    assert "Ranks 0, 2 wait in barrier" in failure.message
    assert "for ranks 1, 3" in failure.message
    assert "Rank 1 was not asked to run this cell" in failure.message
    assert "Rank 3 was not asked to run this cell" in failure.message
    assert_recovers_soon(failure)


def test_wait_outside_a_collective_ends_at_the_deadline_and_shows_its_line():
    run_cell("dist.barrier()")
    failure = failure_of(
        """
        if rank == 0:
            pair = dist.new_group([0, 1])
        """,
        timeout_line(1),
    )
    assert "Rank 0 waits at cell, line 3: pair = dist.new_group([0, 1])" in failure.message
    assert "Every rank has launched the most recent collective, barrier" in failure.message
    assert "Rank 0 waits in dist.new_group: every rank must call it" in failure.message
    assert f"stopped after {scaled(1):g} s" in failure.message
    assert_recovers_soon(failure, kept="variables on the ranks are kept" in failure.message)


# -- cells that await, or that need a keyboard


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("import asyncio\nawait asyncio.sleep(0.01)\nx = rank", [0, 1, 2, 3]),
        ("async def double(n):\n    return 2 * n\nx = await double(rank)", [0, 2, 4, 6]),
        ("import asyncio\nx = sum(await asyncio.gather(*(asyncio.sleep(0, n) for n in range(4))))", [6] * 4),
        ("async def count():\n    yield 1\n    yield 2\nx = [n async for n in count()]", [[1, 2]] * 4),
        ("import asyncio\nasync with asyncio.timeout(9):\n    dist.barrier()\n    x = 1", [1] * 4),
    ],
)
def test_a_cell_can_await(cell, expected):
    run_cell(cell)
    assert ranks.pull("x") == expected
    assert_next_cell_works()


def test_a_cell_that_awaits_for_too_long_is_shown_with_its_line():
    failure = failure_of(
        """
        import asyncio
        async def ask():
            await asyncio.sleep(1000)
        await ask()
        """,
        timeout_line(1),
    )
    assert "Rank 0 is still running: ask, line 4: await asyncio.sleep(1000)" in failure.message
    run_cell("await asyncio.sleep(0)\nleft = len(asyncio.all_tasks())")
    assert ranks.pull("left") == [1] * 4, "the earlier cell still runs"
    assert_recovers_soon(failure)


@pytest.mark.parametrize(
    "call",
    [
        *(
            "breakpoint()",
            "import pdb; pdb.set_trace()",
            "import pdb; pdb.run('1 + 1')",
            "import code; code.interact()",
        ),
        *("input('How many? ')", "import getpass; getpass.getpass()"),
        "from IPython.core.debugger import set_trace\nset_trace()\nprint(1)",
    ],
)
def test_what_needs_a_keyboard_says_what_to_do_instead(call):
    failure = failure_of(call)
    assert "Ranks 0–3 failed: RuntimeError: A " in failure.message
    assert "because nobody can type there" in failure.message and "ordinary cell" in failure.message
    assert_recovers_soon(failure)


# -- ranks that never finish computing


def test_endless_loop_is_shown_with_its_line_and_the_ranks_that_wait():
    failure = failure_of(
        """
        if rank == 1:
            while True: pass
        dist.barrier()
        """,
        timeout_line(1.5),
    )
    assert "Ranks 0, 2, 3 wait in barrier" in failure.message
    assert "for rank 1" in failure.message
    assert "Rank 1 is still running: cell, line 3: while True: pass" in failure.message
    assert f"stopped after {scaled(1.5):g} s" in failure.message
    assert failure.seconds >= scaled(1.5)
    assert_recovers_soon(failure)


def test_cell_that_computes_past_its_deadline_is_stopped():
    failure = failure_of("import time\ntime.sleep(60)", timeout_line(0.5))
    for rank in range(4):
        assert f"Rank {rank} is still running: cell, line 3: time.sleep(60)" in failure.message
    assert "wait" not in failure.lead
    assert f"stopped after {scaled(0.5):g} s" in failure.message
    assert failure.seconds >= scaled(0.5)
    assert_recovers_soon(failure)


def test_slow_cell_within_its_deadline_is_not_stopped():
    run_cell(
        """
        import time
        if rank == 0:
            time.sleep(2.5)
        dist.barrier()
        finished = True
        """
    )
    assert ranks.pull("finished") == [True] * 4


def test_endless_printing_does_not_fill_the_memory(capsys):
    before_bytes = rank_memory_bytes(0)
    failure = failure_of(
        """
        while rank == 0:
            print("x" * 100)
        """,
        timeout_line(1),
    )
    assert rank_memory_bytes(0) - before_bytes < 100e6
    printed = capsys.readouterr().out
    *shown, note = [line for line in printed.splitlines() if line.startswith("rank 0 │ ")]
    assert shown == ["rank 0 │ " + "x" * 100] * 198 and re.fullmatch(r"rank 0 │ … \d+ more lines not shown", note)
    assert "Rank 0 is still running" in failure.message
    assert_recovers_soon(failure)


def rank_memory_bytes(rank: int) -> int:
    return psutil.Process(ranks.current().pids[rank]).memory_info().rss


# -- ranks that fail


def test_exception_on_one_rank_is_reported_as_the_cause_of_the_waits():
    failure = failure_of(
        """
        if rank == 1:
            raise ValueError("no such batch")
        dist.barrier()
        """
    )
    assert failure.message.startswith("Rank 1 failed: ValueError: no such batch\n    cell, line 3: raise ValueError")
    assert "Ranks 0, 2, 3 wait in barrier" in failure.message
    assert "Connection closed" not in failure.message
    assert_recovers_soon(failure)


def test_exception_on_all_ranks_is_reported_once():
    failure = failure_of("import math\n\ndef root(x):\n    return math.sqrt(x)\n\nroot(-1)")
    assert failure.message.count("math domain error") == 1
    assert failure.message.startswith("Ranks 0–3 failed: ValueError")
    assert "cell, line 7: root(-1)\n    root, line 5: return math.sqrt(x)" in failure.message
    assert "a new process group" not in failure.message.lower(), (
        "all ranks launched the same collectives, so the group still works"
    )
    assert_recovers_soon(failure)


def test_only_the_rank_that_runs_out_of_memory_is_blamed():
    failure = failure_of(
        """
        import psutil, resource
        if rank == 1:
            kept = torch.ones(10**8)
            limit_bytes = psutil.Process().memory_info().vms + 2**30
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
            torch.ones(2**30)
        dist.barrier()
        """
    )
    run_cell("resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))")
    assert failure.message.startswith("Rank 1 failed")
    assert "ran out of memory" in failure.message
    assert "cell, line 7: torch.ones(2**30)" in failure.message
    held_gb = float(re.search(r"Its process holds (.*) GB; this machine has .* GB left", failure.message)[1])
    assert 0.4 < held_gb < 1.4  # the tensor that is kept, and torch itself
    run_cell("kept = None")
    assert_recovers_soon(failure)


def test_sys_exit_ends_the_cell_and_not_the_rank(capsys):
    pids = list(ranks.current().pids)
    failure = failure_of("import sys\nsys.exit(3)")
    assert "Ranks 0–3 failed: SystemExit: 3" in failure.message
    assert "To exit" not in capsys.readouterr().out
    assert ranks.current().pids == pids
    assert_recovers_soon(failure)


def test_exit_ends_the_cell_as_sys_exit_does():
    failure = failure_of("exit()")
    assert failure.message.startswith("Ranks 0–3 failed: SystemExit")
    assert_recovers_soon(failure)


def test_a_forked_child_does_not_answer_in_its_parents_place(capsys):
    """Parent and child returned from the cell, so the output was that of either one, and the next collective hung."""
    run_cell("import os\npid = os.fork()\nprint('child' if pid == 0 else 'parent')")
    assert "child" not in capsys.readouterr().out
    run_cell("os.waitpid(pid, 0)")
    assert ranks.run(sum_of_ones) == [4.0] * 4


def sum_of_ones() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def test_syntax_error_is_reported_once_with_its_line():
    failure = failure_of("x = 1\ndef f(:")
    assert failure.message.count("SyntaxError") == 1
    assert failure.message.startswith("Ranks 0–3 failed: cell, line 3")
    assert "ipykernel" not in failure.message
    assert_recovers_soon(failure)


def test_error_that_another_magic_handles_still_fails_the_cell(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('in the script')\n")
    failure = failure_of(f"%run {script}")
    assert "RuntimeError: in the script" in failure.message
    assert "broken.py, line 1" in failure.message
    assert_recovers_soon(failure)


def test_message_about_a_result_that_cannot_be_pickled_says_what_to_return():
    message = call_failure(ranks.run, make_generator)
    assert "Ranks 0–3 failed" in message
    assert "cannot pickle 'generator' object" in message
    assert "Return numbers, tensors" in message
    assert_recovered(message, kept=True)


def make_generator():
    return (number for number in range(3))


def test_pull_of_a_missing_variable_says_where_to_define_it_and_names_the_ranks():
    message = call_failure(ranks.pull, "never_defined")
    assert message.count("NameError") == 1
    assert "no variable 'never_defined'" in message
    assert "%%ranks cell" in message
    run_cell("only_here = 1", "0,1")
    message = call_failure(ranks.pull, "only_here")
    assert message.startswith("Ranks 2, 3 failed: NameError")
    assert_recovered(message, kept=True)


# -- ranks that die


def test_rank_that_lost_its_gpu_is_named_and_all_ranks_restart(monkeypatch):
    """After such an error, a process cannot use a GPU. The test needs none, because it only raises CUDA's message."""
    placement, pids = ranks.current().placement, list(ranks.current().pids)
    monkeypatch.setattr(ranks.current(), "placement", replace(placement, valid="on the GPU that was lost"))
    failure = failure_of(
        """
        if rank == 1:
            raise RuntimeError("CUDA error: unspecified launch failure")
        dist.barrier()
        """
    )
    assert failure.lead.startswith("Rank 1 failed: RuntimeError: CUDA error")
    assert "can no longer use its GPU" in failure.message and "nvidia-smi" in failure.message
    assert failure.message.endswith(f"{placement.valid}")
    assert_recovers_soon(failure, kept=False)
    assert not set(ranks.current().pids) & set(pids) and ranks.current().placement == placement


@pytest.mark.parametrize(
    ("death", "expected"),
    [("os._exit(5)", "exited with status 5"), ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL")],
    ids=["exit", "sigkill"],
)
def test_rank_that_dies_in_a_cell_is_named_and_all_ranks_restart(death, expected):
    pids = list(ranks.current().pids)
    failure = failure_of(
        f"""
        import os, signal
        if rank == 1:
            {death}
        dist.barrier()
        """
    )
    assert "Rank 1 died" in failure.message
    assert expected in failure.message
    assert "barrier" in failure.message
    assert_recovers_soon(failure, kept=False)
    assert not set(ranks.current().pids) & set(pids)


def kill(rank: int) -> None:
    """Kill a rank and wait until the kernel knows it."""
    os.kill(ranks.current().pids[rank], signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while ranks.current().whole:
        assert time.monotonic() < deadline, "the kernel never learned of the death"
        time.sleep(0.01)


def test_rank_killed_between_cells_is_reported_before_the_next_cell_runs():
    kill(2)
    message = call_failure(run_cell, "ran = True")
    assert "Rank 2 died" in message
    assert "SIGKILL" in message
    assert "between two cells" in message
    run_cell("ran = 'ran' in globals()")
    assert ranks.pull("ran") == [False] * 4, "a cell must not run on ranks whose variables are gone"
    assert_recovered(message, kept=False)


def test_start_replaces_the_ranks_if_one_has_died(capsys):
    kill(2)
    ranks.start(4)
    assert "kept" not in capsys.readouterr().out
    assert_next_cell_works()


@pytest.mark.parametrize("before", [True, False], ids=["before it", "inside it"])
def test_death_before_or_inside_a_smaller_world_is_reported_and_the_whole_world_is_back(before):
    if before:
        kill(3)
    with pytest.raises(ranks.RanksError, match="Rank 3 died"), ranks.world(2):
        if not before:
            kill(3)
    assert_next_cell_works()


# -- starting


@pytest.mark.parametrize(
    ("world_size", "backend", "error", "expected"),
    [
        (0, None, ValueError, "at least 1"),
        (-2, None, ValueError, "at least 1"),
        ("4", None, TypeError, "an integer, got '4'"),
        (True, None, TypeError, "an integer, got True"),
        (2.0, None, TypeError, "an integer, got 2.0"),
        (100_000, None, ValueError, "too large for this machine"),
        (4, "mpi", ValueError, "'gloo:cpu', got 'mpi'"),
    ],
)
def test_invalid_start_is_rejected_and_the_running_ranks_are_kept(world_size, backend, error, expected):
    pids = list(ranks.current().pids)
    with pytest.raises(error, match=expected):
        ranks.start(world_size, backend=backend)
    assert ranks.current().pids == pids
    assert_next_cell_works()


@pytest.mark.parametrize("size", [0, 5])
def test_invalid_size_of_a_smaller_world_is_rejected(size):
    with pytest.raises(ValueError, match="ranks 0 to 3"), ranks.world(size):
        pass
    assert_next_cell_works()


@pytest.mark.parametrize(
    "use",
    [
        lambda: run_cell("1"),
        lambda: ranks.run(print),
        lambda: ranks.pull("x"),
        lambda: ranks.world(2).__enter__(),
    ],
    ids=["cell", "run", "pull", "world"],
)
def test_message_without_ranks_says_how_to_start_them(use, no_ranks):
    assert "ranks.start(" in call_failure(use)


def test_second_start_of_the_same_size_keeps_the_ranks(capsys):
    pids = list(ranks.current().pids)
    ranks.start(4)
    assert "variables are kept" in capsys.readouterr().out
    assert ranks.current().pids == pids
    assert ranks.pull("marker") == ["from before the fault"] * 4


def test_start_of_another_size_replaces_the_ranks(capsys):
    old_processes = [psutil.Process(pid) for pid in ranks.current().pids]
    ranks.start(2)
    assert "kept" not in capsys.readouterr().out
    assert not any(process.is_running() for process in old_processes)
    assert_next_cell_works(world_size=2)
    assert "no variable 'marker'" in call_failure(ranks.pull, "marker")


def test_different_collectives_are_named_without_mismatch_detection():
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(2, detect_mismatch=False)
    failure = failure_of(
        """
        values = torch.ones(3)
        if rank == 1:
            dist.broadcast(values, src=1)
        else:
            dist.all_reduce(values)
        """
    )
    assert "do not agree" in failure.message
    assert "rank 0: all_reduce #1" in failure.message
    assert "rank 1: broadcast #1" in failure.message
    assert failure.seconds < SOON_S
    assert_next_cell_works(world_size=2)


# -- the two usual mistakes with sends and receives: a forgotten wait and a wrong shape

DROPS_THE_SEND = """
def swap(tensor):
    received = torch.empty_like(tensor)
    dist.isend(tensor, 1 - rank)
    dist.recv(received, 1 - rank)
    return received
"""
DROPS_THE_RECEIVE = """
def swap(tensor):
    received = torch.empty_like(tensor)
    dist.irecv(received, 1 - rank)
    dist.send(tensor, 1 - rank)
    return received
"""
WRONG_SHAPE = """
def swap(tensor):
    received = torch.empty(1)
    handle = dist.isend(tensor, 1 - rank)
    dist.recv(received, 1 - rank)
    handle.wait()
    return received
"""


def call_swap(swap):
    result = swap(torch.ones(1000))
    dist.barrier()
    return result


def check_of(source: str, capsys) -> tuple[list[str], float]:
    """Return the lines that a check of this piece displays, and the seconds it takes."""
    exercise = Exercise("9.9", "swap")
    for name in ("values", "wire"):
        exercise.check(name, world_sizes=(2,))(lambda attempt: attempt.run(call_swap))
    run_cell(source)
    began = time.monotonic()
    with pytest.raises(CheckFailed):
        exercise()
    return capsys.readouterr().out.splitlines(), time.monotonic() - began


@pytest.mark.parametrize(
    ("source", "op", "line"),
    [
        (DROPS_THE_SEND, "isend", "swap, line 4: dist.isend(tensor, 1 - rank)"),
        (DROPS_THE_RECEIVE, "irecv", "swap, line 4: dist.irecv(received, 1 - rank)"),
    ],
    ids=["isend", "irecv"],
)
def test_a_dropped_handle_is_named_with_its_line(two_ranks, capsys, source, op, line):
    shown, seconds = check_of(source, capsys)
    text = "\n".join(shown)
    assert f"dropped the handle of an {op} without calling its wait(): {line}" in text
    assert "new_group" not in text and "Hint: do you call wait()" in text
    assert "– swap · wire" in text
    assert seconds < scaled(10.0)
    run_cell("kept = callable(swap)")
    assert ranks.pull("kept") == [True] * 2


def test_a_receive_into_a_tensor_that_is_too_small_is_named_with_its_line(two_ranks, capsys):
    shown, seconds = check_of(WRONG_SHAPE, capsys)
    text = "\n".join(shown)
    assert "it received 4000 bytes from rank" in text and "into a tensor of 4 bytes (swap, line 5)" in text
    assert "Hint: what are the shape and dtype" in text and "wait()" not in text
    assert "Your definitions were run again: swap." in text
    assert seconds < scaled(10.0)


def test_a_handle_that_was_waited_for_is_not_blamed(two_ranks):
    run_cell("handles = [dist.isend(torch.ones(1), 1 - rank), dist.irecv(torch.ones(1), 1 - rank)]")
    run_cell("for handle in handles: handle.wait()\ndel handles, handle")
    with pytest.raises(ranks.CellFailed) as caught:
        run_cell("if rank == 0: pair = dist.new_group([0, 1])", timeout_line(1))
    assert "dropped the handle" not in str(caught.value)


def test_sizes_are_read_from_a_file_that_outlives_the_process(no_ranks, tmp_path):
    path = os.path.join(tmp_path, "sizes")
    recorder = sizes.Recorder(path)

    class Call:
        op, partner, number, payload_bytes, called_from = "recv", 3, 2, 4000, ("<ipython-input>", 7, "swap")

    recorder.write(Call)
    assert sizes.read(path) == [sizes.Transfer("recv", 3, 2, 4000, 7, "swap")]
    recorder.clear()
    assert sizes.read(path) == [] and sizes.read(path + "-missing") == []
