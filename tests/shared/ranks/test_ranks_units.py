"""Unit tests of the rank runtime: the doctor's diagnosis, the magic's parsing and output, placement, and interrupts."""

import os
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from IPython.core.error import UsageError
from torch.distributed.checkpoint import CheckpointException

from shared import ranks
from shared.deadlines import scaled
from shared.ranks import devices, diagnosis, doctor, hang_table, interrupts, magic
from shared.ranks.diagnosis import CellState
from shared.ranks.output import OUTPUT_LIMIT_CHARACTERS, OUTPUT_LIMIT_LINES, Output
from shared.ranks.rankside import Outcome
from shared.ranks.running import DEFAULT_TIMEOUT_S
from shared.wire import frames

# -- the doctor's diagnosis of hand-made positions

GROUP = ("default",)


def position(rank: int, launched: int, *, waits="yes", op="all_reduce", members=4) -> dict:
    """Return the position of a rank whose last collective is number `launched` of its group."""
    call = {
        "op": op,
        "number": launched,
        "text": f"{op} #{launched} (float32, 3 elements)",
        "must_agree": f"{op} (3,) float32",
        "lane": list(GROUP),
        "group": list(range(members)),
        "partner": None,
        "tag": None,
        "line": f"cell, line {launched}: dist.{op}(x)",
    }
    return position_with(rank, call if launched else None, [[list(GROUP), launched]] if launched else [], waits)


def point_to_point(rank: int, op: str, partner: int, waits="yes", tag=0) -> dict:
    """Return the position of a rank whose last call is its first send to, or receive from, a partner."""
    lane = ["default", op, partner]
    preposition = "to" if op == "send" else "from"
    text = f"{op} #1 {preposition} rank {partner} (float32, 1 element)"
    call = {"op": op, "number": 1, "text": text, "lane": lane, "group": [0, 1, 2, 3], "partner": partner, "tag": tag}
    return position_with(rank, call | {"line": None}, [[lane, 1]], waits) | {
        "nccl": False,
        "tag_counts": [[lane, tag, 1]],
    }


def position_with(rank: int, call: dict | None, counts: list, waits: str) -> dict:
    here = {"rank": rank, "busy": True, "counts": counts, "call": call, "ahead": [], "dropped": [], "printed": ""}
    here["tag_counts"] = []
    return here | {"line": f"cell, line 9: work({rank})", "waits": waits, "forms_group": False}


def forming_a_group(position: dict) -> dict:
    return position | {"forms_group": True}


def done(position: dict) -> dict:
    return position | {"busy": False, "waits": "no", "line": None}


def cell_of(*positions, **more) -> CellState:
    by_rank = {position["rank"]: position for position in positions}
    finished = {rank: Outcome(rank) for rank, position in by_rank.items() if not position["busy"]}
    return CellState(more.pop("targets", list(by_rank)), more.pop("outcomes", finished), by_rank, **more)


def failed(rank: int, message: str, *, at_s=0.0, **marks) -> Outcome:
    kind = message.split(":")[0]
    error = {"kind": kind, "message": message, "lines": ["cell, line 2: f()"], "mismatch": False}
    error |= {"others_fault": False, "out_of_memory": False, "gpu_lost": False, "batch_open": False} | marks
    return Outcome(rank, error=error, ended_s=at_s)


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0, 1"),
        ([3, 0, 2, 1], "ranks 0–3"),
        ([0, 2], "ranks 0, 2"),
        ([0, 1, 3], "ranks 0, 1, 3"),
        ({1, 2, 3}, "ranks 1–3"),
    ],
)
def test_ranks_are_named_briefly(members, name):
    assert diagnosis.name_ranks(members) == name


def test_a_rank_that_is_out_of_memory_names_the_limit_that_it_met(monkeypatch):
    """A sandbox limits each process. The free memory of the machine would make no sense of the error."""
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (4_000_000_000, 4_000_000_000))
    found = doctor.describe_error(MemoryError())
    assert re.fullmatch(r"Its process holds \d+\.\d GB, and may hold 4\.0 GB\.", found["held"])


def test_the_doctor_answers_although_the_frames_change(monkeypatch):
    monkeypatch.setitem(doctor._work, "busy", True)
    here = threading.get_ident()
    assert doctor.look(3, here)["line"] is not None  # this line counts as the student's code

    def changing_frames(frame):
        assert frame is None, "'str' object has no attribute 'f_back'"
        return []

    monkeypatch.setattr(doctor, "_stack", changing_frames)
    found = doctor.look(3, here)
    assert (found["rank"], found["busy"], found["line"], found["waits"]) == (3, True, None, "no")


def test_failed_checkpoint_is_described_without_tracebacks_of_torch():
    full, missing = OSError(28, "No space left on device"), KeyError("step")
    error = CheckpointException("failed", {2: (full, None), 0: (full, None), 1: (missing, None)})
    message = doctor.describe_error(error)["message"]
    errors = "ranks 0, 2: OSError: [Errno 28] No space left on device; rank 1: KeyError: 'step'"
    assert message == f"CheckpointException: {errors}"


HUNG = {
    # what happened: the ranks' positions, whether they wait for ever, and what the explanation says
    "a finished rank has never launched it": (
        [position(0, 2), position(1, 2), done(position(2, 1))],
        True,
        [
            "wait in all_reduce #2 (float32, 3 elements) for rank 2.",
            "Rank 2 left the cell after all_reduce #1, launched at cell, line 1",
        ],
    ),
    "a rank is still computing": (
        [position(0, 2), position(1, 2), position(2, 1, waits="no")],
        False,
        ["Rank 2 is still running: cell, line 9: work(2)"],
    ),
    "all have launched it": (
        [position(0, 2, members=2), position(1, 2, members=2)],
        False,
        ["Every rank has launched the most recent collective, all_reduce #2"],
    ),
    "both have launched a transfer": (
        [point_to_point(0, "send", 1), point_to_point(1, "recv", 0)],
        False,
        ["Both ranks have launched the most recent transfer, send #1 to rank 1"],
    ),
    "the cell has ended": ([done(position(0, 1)), done(position(1, 1))], False, []),
    "both receive": (
        [point_to_point(0, "recv", 1), point_to_point(1, "recv", 0)],
        True,
        ["Rank 0 waits in recv #1 from rank 1", "none of them can continue"],
    ),
    "nobody receives": (
        [point_to_point(0, "send", 1), done(position(1, 3))],
        True,
        ["Rank 1 left the cell after all_reduce #3", "never launched the matching recv"],
    ),
    "different collectives": (
        [position(0, 2, members=2), position(1, 2, op="broadcast", members=2)],
        True,
        [
            "do not agree",
            "rank 0: all_reduce #2 (float32, 3 elements)",
            "rank 1: broadcast #2 (float32, 3 elements)",
        ],
    ),
}


@pytest.mark.parametrize(("positions", "deadlocked", "said"), HUNG.values(), ids=HUNG)
def test_a_hang_is_explained_and_is_a_deadlock_only_if_nobody_can_continue(positions, deadlocked, said):
    cell = cell_of(*positions)
    assert diagnosis.is_deadlocked(cell) == deadlocked
    assert [part for part in said if part not in diagnosis.explain(cell)] == []


def test_rank_that_has_not_begun_is_no_deadlock():
    """It may still be importing what its cell needs, which looks the same to the doctor as a cell that has ended."""
    cell = cell_of(position(0, 2), position(1, 2), done(position(2, 1)), outcomes={})
    assert not diagnosis.is_deadlocked(cell)


def test_ranks_wait_for_nobody_only_if_all_have_launched_the_same():
    assert diagnosis.waits_for_nobody(cell_of(position(0, 2), position(1, 2)))
    assert not diagnosis.waits_for_nobody(cell_of(position(0, 2), done(position(1, 1))))
    assert not diagnosis.waits_for_nobody(cell_of(position(0, 2), position(1, 1)))
    assert not diagnosis.waits_for_nobody(cell_of(done(position(0, 2)), done(position(1, 2))))


def test_transfer_whose_ends_have_different_tags_is_a_deadlock():
    cell = cell_of(point_to_point(0, "recv", 1, tag=0), point_to_point(1, "recv", 0, tag=7))
    for rank, tag in ((0, 7), (1, 3)):
        sent = ["default", "send", 1 - rank]
        cell.positions[rank]["counts"].append([sent, 1])
        cell.positions[rank]["tag_counts"].append([sent, tag, 1])
    assert not diagnosis.absent(cell.positions[1], cell), "rank 0 has sent with the tag 7"
    assert not diagnosis.is_deadlocked(cell)
    assert "Rank 0 waits in recv #1 from rank 1 (float32, 1 element)." in diagnosis.explain(cell)
    assert "This is recv number 1 with tag 0, but of rank 1's sends to rank 0, none had this" in diagnosis.explain(cell)
    assert "The others had tag 3." in diagnosis.explain(cell)
    assert diagnosis.is_deadlocked(cell_of(cell.positions[0], done(cell.positions[1])))


def test_backward_may_compute_so_only_a_finished_rank_proves_the_deadlock():
    in_backward = [position(0, 2, waits="maybe", members=3), position(1, 1, waits="maybe", members=3)]
    assert not diagnosis.is_deadlocked(cell_of(*in_backward, position(2, 2, members=3)))
    assert diagnosis.is_deadlocked(cell_of(*in_backward, done(position(2, 1, members=3))))


def test_rank_that_does_not_answer_proves_nothing():
    cell = cell_of(position(0, 2), done(position(1, 1)))
    cell.positions[2] = None
    cell.targets.append(2)
    assert not diagnosis.is_deadlocked(cell)
    assert "Rank 2 is not responding, because it is inside a long call into a C library" in diagnosis.explain(cell)


def test_a_waiting_rank_that_others_wait_for_is_described_once():
    cell = cell_of(position(0, 2, op="barrier", members=2), point_to_point(1, "send", 0))
    explanation = diagnosis.explain(cell)
    assert "Rank 0 waits in barrier #2 (float32, 3 elements) for rank 1." in explanation
    assert explanation.count("Rank 1 waits in send #1") == 1


def test_an_error_explains_the_handles_that_it_has_dropped():
    """An error in the middle of a batch of sends and receives drops the handles of those that are launched already."""
    dropped = [{"op": "recv", "line": "cell, line 2: dist.batch_isend_irecv(…)"}]
    both = [point_to_point(0, "send", 1), done(point_to_point(1, "recv", 0)) | {"dropped": dropped}]
    assert "Rank 1 dropped the handle of an irecv" in diagnosis.explain(cell_of(*both))
    explanation = diagnosis.explain(cell_of(*both, outcomes={1: failed(1, "IndexError: tuple index out of range")}))
    assert "Rank 1 failed: IndexError" in explanation and "dropped the handle" not in explanation


@pytest.mark.parametrize("nccl", [True, False])
def test_only_with_nccl_a_ring_is_told_to_batch_its_sends_and_receives(nccl):
    """gloo runs what isend and irecv have launched at the same time."""
    ring = [point_to_point(rank, "send", (rank + 1) % 3) | {"nccl": nccl} for rank in range(3)]
    message = diagnosis.explain(cell_of(*ring))
    assert "none of them can continue" in message
    assert ("one after another, including isend and irecv, unless they are all in one" in message) == nccl


def test_failures_are_described_once_and_by_their_causes():
    early, late = failed(1, "ValueError: early", at_s=1.0), failed(0, "KeyError: 'late'", at_s=5.0)
    message = diagnosis.explain(CellState([0, 1], {0: late, 1: early}))
    assert message.index("Rank 1 failed: ValueError: early") < message.index("Rank 0 failed: KeyError: 'late'")
    same = {rank: failed(rank, "ValueError: same", at_s=rank) for rank in range(4)}
    message = diagnosis.explain(CellState([0, 1, 2, 3], same))
    assert message.startswith("Ranks 0–3 failed") and message.count("ValueError: same") == 1
    broken = failed(0, "RuntimeError: Connection closed by peer", at_s=0.0, others_fault=True)
    message = diagnosis.explain(CellState([0, 1], {0: broken, 1: early}))
    assert "Rank 1 failed: ValueError: early" in message and "Connection closed" not in message
    stopped = failed(0, "KeyboardInterrupt")
    assert "KeyboardInterrupt" not in diagnosis.explain(CellState([0, 1], {0: stopped, 1: early}))


@pytest.mark.parametrize(
    ("status", "expected"),
    [(-9, "SIGKILL"), (-6, "SIGABRT"), (-11, "SIGSEGV"), (5, "exited with status 5"), (0, "exited with status 0")],
)
def test_message_about_a_dead_rank_says_how_it_died(status, expected):
    cell = cell_of(position(0, 1, members=2), targets=[0, 1], deaths={1: status})
    assert diagnosis.explain(cell).startswith("Rank 1 died: ")
    assert expected in diagnosis.explain(cell)
    assert "Rank 0 waits in all_reduce #1 (float32, 3 elements) for rank 1." in diagnosis.explain(cell)


def test_interrupt_is_the_explanation_if_there_is_no_other_cause():
    assert diagnosis.explain(CellState([0], {}, interrupted=True)) == "You interrupted the cell."


def test_table_shows_each_rank_once_with_its_state():
    cell = cell_of(position(0, 2), position(1, 1, waits="no"), done(position(2, 1)), targets=[0, 1, 2], deaths={3: -9})
    rows = [line.split() for line in diagnosis.explain(cell).split("\n\n")[1].splitlines()]
    assert [row[:2] for row in rows] == [
        ["rank", "state"],
        ["0", "waiting"],
        ["1", "running"],
        ["2", "finished"],
        ["3", "died"],
    ]


# -- the magic


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", (None, DEFAULT_TIMEOUT_S)),
        ("0,2", ([0, 2], DEFAULT_TIMEOUT_S)),
        ("2, 0", ([0, 2], DEFAULT_TIMEOUT_S)),
        ("1,1", ([1], DEFAULT_TIMEOUT_S)),
        ("--timeout 2.5", (None, 2.5)),
        ("3 --timeout 20", ([3], 20.0)),
        ("--timeout=5 0", ([0], 5.0)),
    ],
)
def test_line_of_the_magic_is_parsed(line, expected):
    assert magic.parse(line, world_size=4) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("4", "the ranks are 0 to 3, got 4"),
        ("-1", "the ranks are 0 to 3"),
        ("zero", "'zero' is not a list of ranks"),
        ("0-2", "not a list of ranks"),
        ("0,,2", "not a list of ranks"),
        ("0 2", "unrecognized arguments: 2"),
        ("--timeout", "expected one argument"),
        ("--timeout soon", "invalid float value"),
        ("--timeout 0", "above 0"),
        ("--timeout -3", "above 0"),
        ("--timeout nan", "above 0"),
        ("--timeout inf", "above 0"),
        ("--verbose", "unrecognized arguments"),
    ],
)
def test_invalid_line_is_rejected_in_one_sentence(line, expected):
    with pytest.raises(UsageError, match="%%ranks") as caught:
        magic.parse(line, world_size=4)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "merged"),
    [
        ({0: "a\n", 1: "a\n"}, [([0, 1], "a\n")]),
        ({1: "b", 0: "a", 2: "a"}, [([0, 2], "a"), ([1], "b")]),
        ({0: "", 1: " \n", 2: "c"}, [([2], "c")]),
        ({}, []),
    ],
)
def test_equal_outputs_are_merged_in_rank_order(texts, merged):
    assert magic.merge(texts) == merged


def test_output_is_printed_in_rank_order_with_the_names_of_its_ranks(capsys):
    texts = {3: "same\n", 0: "same\n", 1: "other\nlines\n", 2: "same\n"}
    magic.show({rank: Outcome(rank, text=text) for rank, text in texts.items()}, world_size=4)
    assert capsys.readouterr().out == (
        "ranks 0, 2, 3 │ same\n"
        "rank 1        │ other\n"
        "rank 1        │ lines\n"
    )  # fmt: skip


def test_printed_text_is_kept_up_to_a_limit():
    text = Output()
    for _ in range(3):
        assert text.write("x" * OUTPUT_LIMIT_CHARACTERS) == OUTPUT_LIMIT_CHARACTERS
    kept, note = text.getvalue().split("\n", 1)
    assert kept == "x" * OUTPUT_LIMIT_CHARACTERS
    assert f"{2 * OUTPUT_LIMIT_CHARACTERS} more characters not shown" in note


@pytest.mark.parametrize(("length", "shown"), [(1, OUTPUT_LIMIT_LINES), (999, OUTPUT_LIMIT_CHARACTERS // 1000)])
def test_printed_text_is_cut_at_whole_lines(length, shown):
    text = Output()
    for _ in range(300):
        text.write("x" * length + "\n")
    assert text.getvalue() == ("x" * length + "\n") * shown + f"… {300 - shown} more lines not shown\n"


# -- placement


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has some GPUs, with or without an NCCL that needs one GPU per rank."""

    def pretend(gpus: int, nccl: bool = True) -> None:
        monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
        monkeypatch.setattr("shared.ranks.nccl.version_for_ranks", lambda: (2, 29, 7))

    monkeypatch.delenv("RANKS_BACKEND", raising=False)
    return pretend


CPU = ("cpu",) * 4
SHARED = ("cuda:0", "cuda:1") * 2


@pytest.mark.parametrize(
    ("gpus", "nccl", "asked", "backend", "found", "said"),
    [
        (4, True, None, devices.NCCL, ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), "memory and times here"),
        (1, True, None, "gloo", CPU, "The ranks run on the CPU, because ranks can share a GPU only with NCCL 2.30 or"),
        (2, True, None, "gloo", CPU, "The ranks run on the CPU, because ranks can share a GPU only with NCCL 2.30 or"),
        (4, False, None, "gloo", CPU, "The ranks run on the CPU, because this build of PyTorch has no NCCL. "),
        (2, True, "gloo", "gloo", SHARED, "not communication times: 4 ranks share 2 GPUs."),
        (2, False, "gloo", "gloo", SHARED, "cannot send or receive"),
        (0, True, None, "gloo", CPU, "4 ranks share 2 cores"),
    ],
)
def test_ranks_are_placed_where_they_can_send_and_the_placement_says_what_is_valid(
    machine, monkeypatch, gpus, nccl, asked, backend, found, said
):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    machine(gpus, nccl)
    placement = devices.place(4, asked)
    assert (placement.backend, placement.devices) == (backend, found)
    assert said in placement.valid
    assert "because" not in devices.place(4, "gloo:cpu").valid  # that was asked for
    assert gpus or "share" not in devices.place(2).valid


def test_hosts_behind_a_link_use_the_cpu_unless_they_ask_for_gpus(machine):
    machine(gpus=4)
    assert devices.place(2, link="1gbit").devices == ("cpu", "cpu")
    assert "communication times on such links" in devices.place(2, link="1gbit").valid
    assert devices.place(2, "gloo", link="1gbit").devices == ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="communicate over TCP"):
        devices.place(2, "nccl", link="1gbit")


@pytest.mark.parametrize("backend", ["gloo", "gloo:cpu", "nccl"])
def test_argument_and_environment_variable_choose_the_same(machine, monkeypatch, backend):
    machine(gpus=4)
    by_argument = devices.place(2, backend)
    monkeypatch.setenv("RANKS_BACKEND", backend)
    assert devices.place(2) == by_argument
    assert ("nccl" in by_argument.backend) == (backend == "nccl")
    assert by_argument.devices[0] == ("cpu" if backend == "gloo:cpu" else "cuda:0")
    monkeypatch.setenv("RANKS_BACKEND", "nonsense")
    assert devices.place(2, backend) == by_argument
    with pytest.raises(ValueError, match="'nonsense'"):
        devices.place(2)


@pytest.mark.parametrize(
    ("gpus", "nccl", "backend", "expected"),
    [
        (4, True, "mpi", "'nccl', 'nccl:shared', 'gloo', 'gloo:cpu', got 'mpi'"),
        (4, False, "nccl", "no NCCL"),
        (1, True, "nccl", "world_size is 2 and this machine has 1 GPU: use"),
        (0, True, "nccl", "world_size is 2 and this machine has 0 GPUs: use"),
    ],
)
def test_backend_that_cannot_run_here_is_rejected(machine, gpus, nccl, backend, expected):
    machine(gpus, nccl)
    with pytest.raises(ValueError, match=expected):
        devices.place(2, backend)


def test_gpus_allow_a_larger_world_size_than_cores_do(machine, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    machine(gpus=16)
    devices.check_world_size(16)
    machine(gpus=8)
    with pytest.raises(ValueError, match="start at most 8 ranks"):
        devices.check_world_size(16)


# -- the student's lines


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("/tmp/ipykernel_12/345.py", True),
        ("<ipython-input-1-abc>", True),
        (os.path.abspath("my_ddp.py"), True),
        (torch.__file__, False),
        (os.__file__, False),
        (ranks.__file__, False),
        ("<string>", False),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_lines_of_the_student_are_recognized(filename, expected):
    assert frames.is_student_file(filename) == expected


def test_line_is_described_by_its_file_and_code(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\n    x = 1  \n")
    assert frames.where(str(script), 2) == "train.py, line 2: x = 1"
    assert frames.where(str(script), 7) == "train.py, line 7"
    assert frames.where("/tmp/ipykernel_12/345.py", 3) == "cell, line 3"
    assert frames.where("/tmp/ipykernel_12/345.py", 3, "average") == "average, line 3"


def test_innermost_frame_of_the_student_is_found():
    here = sys._getframe()
    assert frames.innermost_student_frame(here) is here
    assert frames.innermost_student_frame(None) is None


# -- smaller worlds on the same processes


def rank_size_and_sum() -> tuple[int, int, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def assert_whole_world() -> None:
    assert ranks.run(rank_size_and_sum) == [(rank, 4, 4.0) for rank in range(4)]
    assert ranks.pull("world_size") == [4] * 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_smaller_world_has_the_first_ranks(four_ranks, size):
    with ranks.world(size):
        assert ranks.run(rank_size_and_sum) == [(rank, size, float(size)) for rank in range(size)]
        assert ranks.pull("world_size") == [size] * size
    assert_whole_world()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def exit_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def fail_in_the_notebook(fn) -> None:
    raise KeyError("not on a rank")


@pytest.mark.parametrize(
    ("run", "fn", "error", "message"),
    [
        (ranks.run, fail_on_rank_1, ranks.CellFailed, "Rank 1 failed: ValueError: on purpose"),
        (ranks.run, exit_on_rank_1, ranks.CellFailed, "Rank 1 died"),
        (fail_in_the_notebook, None, KeyError, "not on a rank"),
    ],
)
def test_whole_world_is_back_after_a_failure(four_ranks, run, fn, error, message):
    with pytest.raises(error, match=message), ranks.world(3):
        run(fn)
    assert_whole_world()


def test_functions_and_values_are_sent_both_ways(four_ranks):
    results = ranks.run(scale, torch.ones(2), factor=3.0)
    assert [result.tolist() for result in results] == [[0.0, 0.0], [3.0, 3.0], [6.0, 6.0], [9.0, 9.0]]


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor * dist.get_rank()


def test_ranks_draw_different_numbers_and_equal_ones_after_seeding(four_ranks):
    assert len(set(ranks.run(draw_python))) == 4
    assert len(set(ranks.run(draw_torch_seeded))) == 1


def draw_python() -> float:
    import random

    return random.random()


def draw_torch_seeded() -> float:
    torch.manual_seed(1)
    return torch.rand(1).item()


# -- interrupts


def test_an_interrupt_waits_for_the_end_of_the_block():
    answers = []
    with pytest.raises(KeyboardInterrupt), interrupts.held() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        with interrupts.held() as interrupted_in_nested_block:
            assert interrupted_in_nested_block()
        answers.append(interrupted())
    assert answers == [True]
    with pytest.raises(KeyboardInterrupt):  # the previous handler is installed again
        signal.raise_signal(signal.SIGINT)


def test_an_error_in_the_block_is_raised_instead_of_the_interrupt():
    with pytest.raises(ValueError, match="the cause"), interrupts.held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the cause")


def test_interrupts_are_not_held_outside_the_main_thread():
    def hold() -> bool:
        with interrupts.held() as interrupted:
            return interrupted() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler

    with ThreadPoolExecutor() as pool:
        assert pool.submit(hold).result(timeout=scaled(10)) is False


# -- a group that some ranks never form


def test_the_table_of_a_hang_points_at_the_rank_that_is_missing():
    found = [hang_table.Row(0, "waiting", "all_reduce #1", "x < y", (1,)), hang_table.Row(1, "finished", "none", "–")]
    html = hang_table.as_html(found)
    assert "→ <b>rank 1</b>" in html and "finished, <b>missed</b>" in html and "x &lt; y" in html


def test_a_rank_that_forms_a_group_is_not_said_to_wait_in_its_last_collective():
    cell = cell_of(forming_a_group(position(0, 4)), *(position(rank, 5) for rank in (1, 2, 3)))
    explanation = diagnosis.explain(cell)
    assert "Ranks 1–3 wait in all_reduce #5 (float32, 3 elements) for rank 0." in explanation
    assert "Rank 0 waits in dist.new_group instead." in explanation
    assert "Rank 0 waits in all_reduce #4" not in explanation
