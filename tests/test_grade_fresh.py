"""Attacks, accidents and honest work that a fresh reviewer found after all other tests of grading were written."""

import functools
import signal
import time
from dataclasses import replace

import pytest

from instructor import build
from instructor.grade import (
    assembly,
    command,
    course,
    dashboard,
    fingerprints,
    grading,
    lms_zips,
    outputs,
    records,
    submissions,
)
from instructor.grade.limits import Limits
from instructor.grade.policy import Policy
from shared.checks.engine import candidate
from shared.deadlines import scaled
from shared.wire import instrumentation
from tests.handed_in import CHAPTERS, cells_of, hand_in, left_over, need_sandbox, packed, writes

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_of_our_own")]


def graded(folder, lab: str, numbers: tuple[str, ...], sources: dict[str, str]):
    """Grade the exercises with these numbers in a submission with these sources, and return its record."""
    need_sandbox()
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        tasks = tuple(task for task in unpacked.tasks if task.number in numbers)
        assert len(tasks) == len(numbers)
        return grading.grade(hand_in(folder, "eve", lab, writes(**sources)), replace(unpacked, tasks=tasks), Limits())


def ours(lab: str, name: str) -> str:
    """Return our own solution of an exercise."""
    notebook = build.solution_of(CHAPTERS[lab])
    cells = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("solution")]
    return next(cell.source for cell in cells if cell.metadata["nbgrader"]["grade_id"] == name)


# -- kind 1: cheats that earned points without a notice

# A line of a string that looked like a __future__ import was once moved to the top of the file. It ran there, although
# static_checks.py had read it only as a string.
CODE_IN_A_TEXT = '''%%ranks
NOTES = """
from __future__ import annotations; from torch.nn.parallel import DistributedDataParallel as Wrapper; import sys
"""

class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        broadcast_state(module, group)
        options = {"find_unused_parameters": True, "broadcast_buffers": False}
        self.module, self.hidden = module, [Wrapper(module, process_group=group, **options)]

    def forward(self, *inputs, **kwargs):
        return self.hidden[0](*inputs, **kwargs)

    def finish_gradient_sync(self):
        pass
'''
# replicate() uses DistributedDataParallel inside. screen.READY_MADE lacks its name, but its module is rejected.
REPLICATE = """%%ranks
from torch.distributed._composable.replicate import replicate

class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        broadcast_state(module, group)
        self.module = module
        if any(p.requires_grad for p in module.parameters()):
            mesh = {"process_group": group} if group is not None else {}
            replicate(module, find_unused_parameters=True, broadcast_buffers=False, **mesh)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self):
        pass
"""
# The address and port of a listening socket encode three bytes, which every rank can read in /proc/net/tcp. Nothing is
# sent, so the meter counts nothing. The all-reduce, which is counted, sends only zeros. static_checks.py finds no name
# that it knows, because the code renames a module of torch and puts the names of other modules together while it runs.
LISTENING = '''%%ranks
_core = dist.distributed_c10d
_modules = _core.sys.modules
_socket, _system, _files, _clock = (_modules[name] for name in ("soc" + "ket", "o" + "s", "i" + "o", "ti" + "me"))
_kept = _core.__dict__.setdefault("_kept_here", {"open": []})

def _heard(ports):
    """Return what each user's sockets in this range say, in order."""
    found = {}
    for line in _files.open("/proc/self/net/tcp").read().splitlines()[1:]:
        words = line.split()
        address, _, port = words[1].partition(":")
        if words[3] == "0A" and int(port, 16) in ports:
            four = bytes.fromhex(address)[::-1]
            own = found.setdefault(int(words[7]), {})
            own[four[1]] = bytes([four[2], four[3], (int(port, 16) - ports.start) % 256])
    return found

def _exchange(data, members):
    """Return every member's bytes. Nothing is sent."""
    me, world = dist.get_rank(), dist.get_world_size()
    key, turns, old = (members, world), _kept.setdefault("turns", {}), _kept["open"]
    turn = turns[key] = turns.get(key, 0) + 1
    keep = 1 if _kept.get("key") == key else 0
    _kept["key"] = key
    block = (len(members) - 1 + 4 * (world != len(members))) * 4 + turn % 4
    ports = range(16_000 + 1024 * block, 17_024 + 1024 * block)
    while len(old) > keep:
        for each in old.pop(0):
            each.close()
    padded, mine = data + bytes(-len(data) % 3), []
    for at in range(0, len(padded), 3):
        one, two, three = padded[at : at + 3]
        each = _socket.socket()
        each.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        each.bind((f"127.{at // 3 + 1}.{one}.{two}", ports.start + 256 * me + three))
        each.listen(1)
        mine.append(each)
    old.append(mine)
    first, until = _system.getuid() - me, _clock.time() + 15
    while True:
        found = _heard(ports)
        parts = [found.get(first + rank, {}) for rank in members]
        if all(len(part) == len(padded) // 3 for part in parts):
            return [b"".join(part[at] for at in sorted(part))[: len(data)] for part in parts]
        assert _clock.time() < until, [len(part) for part in parts]
        _clock.sleep(0.001)

def mean_over_ranks_(tensor, group=None):
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    own = tensor.detach().cpu().contiguous().view(-1)
    said = _exchange(bytes(own.view(torch.uint8).tolist()), members)
    every = [torch.tensor(list(each), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape) for each in said]
    dist.all_reduce(torch.zeros_like(own), group=group)  # for the meter and the record
    tensor.copy_(torch.stack(every).mean(0))
'''
# The function that contextlib.contextmanager wraps is in a closure. The fingerprints did not cover closures at first,
# so this code could change both records of the collectives.
CLOSURE_OF_LISTENING = """%%ranks
import contextlib as _context
_core = dist.distributed_c10d
_modules = _core.sys.modules
_get, _set = (_modules["buil" + "tins"].__dict__[name] for name in ("get" + "attr", "set" + "attr"))

def _patch():
    listening = _modules["shar" + "ed.wire.instru" + "mentation"].listening
    cell = _get(listening, "__clo" + "sure__")[0]
    plain = _context.contextmanager(_get(cell, "cell_" + "contents"))
    if "_mine" in _core.__dict__:
        return
    _core.__dict__["_mine"] = True

    def told(*args, **kwargs):
        with plain(*args, **kwargs) as calls:
            yield calls
        size, rank = dist.get_world_size(), dist.get_rank()
        done = [each for each in calls if each.op == "broadcast"]
        calls[:] = [each for each in calls if each.op != "broadcast"]
        for each in done:
            src = _core.__dict__["_src"]
            for other in range(size):
                if other != src and rank in (src, other):
                    one = object.__new__(type(each))
                    op, partner = ("send", other) if rank == src else ("recv", src)
                    one.__dict__.update(each.__dict__, op=op, partner=partner)
                    calls.append(one)

    _set(cell, "cell_" + "contents", told)

def broadcast_by_hand(tensor, src):
    _patch()
    _core.__dict__["_src"] = src
    dist.broadcast(tensor, src)
"""
HIDES = """

class ZeRO1(ZeRO1):
    def update_parameters(self, *args, **kwargs):
        result = super().update_parameters(*args, **kwargs)
        tensors = [tensor for group in self.param_groups for tensor in group["params"] if tensor.numel()]
        self.kept = [_hidden(tensor.detach().clone().contiguous().view(-1)) for tensor in tensors for _ in range(4)]
        return result
"""
AS_TEXT = "\n\ndef _hidden(tensor):\n    return tensor.view(torch.uint8).numpy().tobytes().decode('latin-1')\n"
AS_SPARSE = "\n\ndef _hidden(tensor):\n    return tensor.to_sparse()\n"
AS_GRAPH = "\n\ndef _hidden(tensor):\n    return tensor.float().requires_grad_().exp().exp().sum()\n"
AS_TENSOR = "\n\ndef _hidden(tensor):\n    return tensor\n"  # not hidden at all
AS_NUMBERS = (
    "\n\ndef _hidden(tensor):\n    return int.from_bytes(tensor.view(torch.uint8).numpy().tobytes(), 'little')\n"
)

CHEATS = {
    "code in a text": ("02_manual_ddp", "2.4", {"manual_ddp": CODE_IN_A_TEXT}),
    "torch's replicate": ("02_manual_ddp", "2.4", {"manual_ddp": REPLICATE}),
    "the closure of listening": ("00_ranks", "0.5", {"broadcast_by_hand": CLOSURE_OF_LISTENING}),
    "sockets that only listen": ("02_manual_ddp", "2.1", {"mean_over_ranks": LISTENING}),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_nothing_or_is_named_to_the_instructor(tmp_path, name):
    lab, number, sources = CHEATS[name]
    record = graded(tmp_path, lab, (number,), sources)
    (answer,) = record.answers
    assert answer.points == 0 or record.notices, answer
    assert not left_over()


@pytest.mark.parametrize("way", ["AS_TENSOR", "AS_TEXT", "AS_SPARSE", "AS_GRAPH", "AS_NUMBERS"])
def test_hidden_memory_costs_points(tmp_path, way):
    source = ours("07_zero1", "zero1-2") + globals()[way] + HIDES
    (answer,) = graded(tmp_path, "07_zero1", ("7.4",), {"zero1_2": source}).answers
    assert answer.points < answer.max_points


def test_a_text_stays_a_text():
    """A line of a string that looked like a __future__ import once ran at the top of the file, unscreened."""
    cell = {"grade_id": "x", "source": CODE_IN_A_TEXT.removeprefix("%%ranks\n"), "line": 1}
    source, _ = assembly.assembled([cell], "")
    assert source.strip() == cell["source"].strip()


CLOSURE = "__clo" + "sure__"


def test_a_function_that_a_decorator_has_wrapped_is_found_if_it_is_replaced():
    """A decorator keeps the function that it wraps in a closure."""
    cell = instrumentation.listening.__closure__[0]
    before, kept = fingerprints.take("shared.checks.first_collectives"), cell.cell_contents
    try:
        cell.cell_contents = lambda *args, **kwargs: iter([[]])
        assert fingerprints.replaced(before, fingerprints.take("shared.checks.first_collectives"))
    finally:
        cell.cell_contents = kept


def test_functions_in_a_cache_or_a_partial_are_found_if_they_are_replaced():
    def one():
        return 1

    def two():
        return 2

    for wrap in (functools.cache, functools.partial):
        assert fingerprints._digest(wrap(one)) != fingerprints._digest(wrap(two))


def test_other_defaults_of_a_function_are_found():
    before, kept = fingerprints.take("shared.checks.first_collectives"), candidate.probe.__defaults__
    try:
        candidate.probe.__defaults__ = (5,)
        assert fingerprints.replaced(before, fingerprints.take("shared.checks.first_collectives"))
    finally:
        candidate.probe.__defaults__ = kept


# -- kind 2: submissions that disturb grading

DEEP = "%%ranks\ndef {}(*_):\n    raise ValueError\n\n_deep = " + "-" * 900 + "1\n"


def test_deep_code_does_not_stop_the_grading_of_its_own_submission(tmp_path):
    sources = {
        "ring_step": DEEP.format("ring_step"),
        "ring_reduce_scatter": "%%ranks\ndef ring_reduce_scatter(tensor, group=None):\n    ring_step(tensor, tensor)\n",
    }
    record = graded(tmp_path, "01_collectives", ("1.1", "1.2"), sources)
    assert len(record.answers) == 2


def record_with(code: str, student: str = "eve"):
    with course.unpacked(CHAPTERS["00_ranks"]) as unpacked:
        answers = [replace(grading._answer(task, [], "x"), cells=list(task.cells)) for task in unpacked.tasks]
    return records.Record(
        student, "00_ranks", "", answers, code={cell: code for each in answers for cell in each.cells}
    )


@pytest.mark.parametrize(
    "code",
    [
        DEEP.removeprefix("%%ranks\n").format("f"),
        "x = '\ud800'\n" * 40,
        "# \x00\n" * 40,
        "def f():\n" * 1 + "    return " + "[" * 190 + "]" * 190,
    ],
)
def test_no_code_stops_the_dashboard(tmp_path, code):
    """The tables and the dashboard are written after everything has been graded."""
    found = [record_with(code), record_with("def f(x):\n    return x + 1\n" * 20, "ada")]
    dashboard.write(found, tmp_path)
    kept = outputs.Outputs(tmp_path, Policy())
    for record in found:
        kept.save(record, submissions.Submission(record.student, record.lab, None))
    kept.write_all()


def test_one_submission_does_not_keep_the_tables_of_all_from_being_written(tmp_path):
    """A right exercise with a deeply nested expression once made the command fail after everybody had been graded."""
    need_sandbox()
    hand_in(tmp_path / "in", "ada", "00_ranks")
    source = ours("00_ranks", "sum-over-ranks") + "\n\n_deep = " + "-" * 900 + "1\n"
    hand_in(tmp_path / "in", "eve", "00_ranks", writes(sum_over_ranks=source))
    found = command.grade_all(tmp_path / "in", tmp_path / "out", command.Request(0, jobs=1))
    assert {record.student for record in found} == {"ada", "eve"}


def test_second_chances_are_decided_in_a_short_time(tmp_path, monkeypatch):
    """The grader finds out outside of the sandbox which cells use which others. Nothing else limits the time there."""
    lab = "13_tensor_parallel"
    many = "\n".join(f"x{i} = [sum_over_ranks, {i}]" for i in range(14_000))
    submission = hand_in(tmp_path, "eve", lab, writes(sum_over_ranks="%%ranks\n" + many))
    monkeypatch.setattr(grading.Grading, "_judged", lambda self, tasks, pieces: {})
    with course.unpacked(CHAPTERS[lab]) as unpacked:
        record = records.Record("eve", lab, "", [])
        judging = grading.Grading(cells_of(submission), unpacked, Limits(), record)
        failed = {task.name: grading._answer(task, [], "wrong") for task in unpacked.tasks}
        began = time.monotonic()
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
        signal.alarm(int(scaled(20)))
        try:
            judging._second_chances(failed)
        finally:
            signal.alarm(0)
    assert time.monotonic() - began < scaled(20)


LONG_EVIDENCE = """%%ranks
def sum_over_ranks(value):
    raise ValueError("(Drawn with " * 80_000)
"""


def test_a_long_error_does_not_delay_the_dashboard(tmp_path):
    record = graded(tmp_path, "00_ranks", ("0.1",), {"sum_over_ranks": LONG_EVIDENCE})
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
    signal.alarm(int(scaled(20)))
    try:
        dashboard.write([record], tmp_path)
    finally:
        signal.alarm(0)


METADATA = """---
submission_200:
  :submitters:
  - :name: Eve
    :email: eve@x.org
  :created_at: 2026-12-09 22:00:00 +0100
submission_300:
  :submitters:
  - :name: Ada
    :email: ada@x.org
  :created_at: 2026-12-01 22:00:00 +0100
"""


def test_a_folder_that_eve_uploads_to_gradescope_cannot_replace_the_work_of_ada(tmp_path):
    """Students can upload folders to Gradescope. The grader must not read their names as Moodle's."""
    files = {
        "assignment_9_export/submission_metadata.yml": METADATA,
        "assignment_9_export/submission_300/00_ranks_lab.ipynb": "ada's",
        "assignment_9_export/submission_200/00_ranks_lab.ipynb": "eve's",
        "assignment_9_export/submission_400/Ada_300_assignsubmission_file_/00_ranks_lab.ipynb": "eve's",
    }
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    assert (tmp_path / "in/Ada_300/00_ranks/00_ranks.ipynb").read_text() == "ada's"


def test_metadata_that_eve_uploads_to_gradescope_does_not_count(tmp_path):
    """In the zip file, the files in submission_200 come before Gradescope's own submission_metadata.yml."""
    files = {
        "assignment_9_export/submission_200/00_ranks_lab.ipynb": "eve's",
        "assignment_9_export/submission_200/submission_metadata.yml": METADATA.replace("12-09", "11-01"),
        "assignment_9_export/submission_300/00_ranks_lab.ipynb": "ada's",
        "assignment_9_export/submission_metadata.yml": METADATA,
    }
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    assert "2026-12-09" in (tmp_path / "in/Eve_200/00_ranks/timestamp.txt").read_text()


def test_a_name_that_a_student_gave_a_cell_is_not_shown(tmp_path):
    """Copied cells were once reported by the name in their metadata, which may be any text."""

    def change(notebook):
        for _ in range(2):
            cell = dict(notebook.cells[-1], cell_type="code", source="x = 1", outputs=[], execution_count=None)
            cell["id"] = f"eve{_}"
            cell["metadata"] = {"nbgrader": {"solution": True, "grade_id": "<script>" + "\n=cmd|x;" * 60_000}}
            notebook.cells.append(build.nbformat.from_dict(cell))

    need_sandbox()
    with course.unpacked(CHAPTERS["00_ranks"]) as unpacked:
        task = next(task for task in unpacked.tasks if task.number == "0.1")
        record = grading.grade(hand_in(tmp_path, "eve", "00_ranks", change), replace(unpacked, tasks=(task,)), Limits())
    kept = outputs.Outputs(tmp_path / "out", Policy())
    kept.save(record, submissions.Submission("eve", "00_ranks", None))
    page = (tmp_path / "out/feedback/eve/00_ranks.html").read_text()
    assert "<script>\n=cmd" not in page
    assert all(len(note) < 10_000 for note in record.notes)


# -- kind 3: right, but unusual

QUESTION = """%%ranks
def sum_over_ranks(value):
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()

?dist.all_reduce
"""
PERCENT = """%%ranks
def pass_right(tensor):
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return tensor.clone()
    right = (
        (rank + 1)
        % size
    )
    received = torch.empty_like(tensor)
    works = [dist.isend(tensor, right), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    return received

%time pass_right(torch.ones(2))
"""
SAME_HELPER = (
    """%%ranks
def _total(value):
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()

def sum_over_ranks(value):
    return _total(value)
""",
    """%%ranks
def _total(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)])
    dist.all_reduce(total)
    return total

def global_mean(values):
    total, count = _total(values)
    return (total / count).item()
""",
)
A_GROUP_EACH_TIME = """%%ranks
def average_gradients(module, group=None):
    group = group or dist.new_group()  # of all ranks
    world_size = dist.get_world_size(group)
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            p.grad /= world_size
"""
LOCAL_GROUP = A_GROUP_EACH_TIME.replace(
    "new_group()", "new_group([*range(dist.get_world_size())], use_local_synchronization=True)"
)
SLOW = """%%ranks
import time

def sum_over_ranks(value):
    time.sleep(SECONDS)  # as if the network were slow
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
"""
TWO_MEANINGS = (  # Each exercise has a constant of its own, but both constants have the same name.
    """%%ranks
SIZE = 1  # elements

def sum_over_ranks(value):
    total = torch.full((SIZE,), value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
""",
    """%%ranks
SIZE = 2  # the sum and the count

def global_mean(values):
    total = torch.zeros(SIZE, dtype=torch.float64)
    total[0], total[1] = values.sum(), len(values)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
""",
)
GROWS = """%%ranks
_history = []

def log_mean_loss(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    _history.append(mean)  # for a plot later
    return mean.item() if dist.get_rank() == 0 else None
"""
# A notebook has four ranks. Grading loads the file again before each probe, sometimes on fewer ranks.
TRIES_IT = """%%ranks
def sum_over_ranks(value):
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()

assert sum_over_ranks(float(rank)) == 6.0  # 0 + 1 + 2 + 3
"""
TRIES_A_LARGE_ONE = (
    ours("00_ranks", "broadcast-by-hand")
    + """

example = torch.full((200_000,), float(rank))
broadcast_by_hand(example, 0)
print(example[0].item())
"""
)
FROM_MINE = ours("03_gradient_bucketing", "bucketed-ddp").replace(
    "%%ranks\n", "%%ranks\nfrom shared.mine import broadcast_state  # as its documentation says\n", 1
)
MEASURES = (
    ours("00_ranks", "sum-over-ranks")
    + """

import time as clock
began = clock.perf_counter()
while clock.perf_counter() - began < 3:  # how many calls are there in 3 s?
    pass
"""
)

DETERMINISTIC = ours("00_ranks", "sum-over-ranks") + "\n\ntorch.use_deterministic_algorithms(True)\n"
STEPS = (
    ours("02_manual_ddp", "average-gradients")
    + """

_layer = nn.Linear(2, 2)
_optimizer = torch.optim.AdamW(_layer.parameters())
_layer(torch.ones(2)).sum().backward()
_optimizer.step()
"""
)
# The first exercise fails with the helper of the second one, and is defined there once more.
DEFINED_LATER = (
    SAME_HELPER[0].replace("def sum_over_ranks(value):", "def _unused(value):"),
    SAME_HELPER[1] + "\n\ndef sum_over_ranks(value):\n    return 0.0\n",
)
HONEST = {
    "a step of an optimizer": ("02_manual_ddp", {"average_gradients": STEPS}, ("2.3",)),
    "deterministic algorithms": ("00_ranks", {"sum_over_ranks": DETERMINISTIC}, ("0.1",)),
    "two constants of the same name": (
        "00_ranks",
        {"sum_over_ranks": TWO_MEANINGS[0], "global_mean": TWO_MEANINGS[1]},
        ("0.1", "0.2"),
    ),
    "a history": ("00_ranks", {"log_mean_loss": GROWS}, ("0.4",)),
    "an example for four ranks": ("00_ranks", {"sum_over_ranks": TRIES_IT}, ("0.1", "0.2")),
    "a piece from shared.mine": ("03_gradient_bucketing", {"bucketed_ddp": FROM_MINE}, ("3.4",)),
    "a measurement of 3 s": ("00_ranks", {"sum_over_ranks": MEASURES}, ("0.1",)),
    "an example with a large tensor": ("00_ranks", {"broadcast_by_hand": TRIES_A_LARGE_ONE}, ("0.4", "0.5")),
    "a question mark": ("00_ranks", {"sum_over_ranks": QUESTION}, ("0.1",)),
    "a line that begins with %": ("00_ranks", {"pass_right": PERCENT}, ("0.3",)),
    "two helpers of the same name": (
        "00_ranks",
        {"sum_over_ranks": SAME_HELPER[0], "global_mean": SAME_HELPER[1]},
        ("0.1", "0.2"),
    ),
    "a group for each call": ("02_manual_ddp", {"average_gradients": A_GROUP_EACH_TIME}, ("2.3",)),
    "a group that is formed by its members": ("02_manual_ddp", {"average_gradients": LOCAL_GROUP}, ("2.3",)),
    "slow": ("00_ranks", {"sum_over_ranks": SLOW.replace("SECONDS", str(scaled(1)))}, ("0.1",)),
}


def test_a_second_run_without_the_piece_changes_nothing(tmp_path):
    """The cells up to 0.1 do not define its function, so they cannot be judged alone. Its first verdicts count."""
    sources = dict(zip(("sum_over_ranks", "global_mean"), DEFINED_LATER, strict=True))
    one, other = graded(tmp_path, "00_ranks", ("0.1", "0.2"), sources).answers
    assert one.points == 0 and one.verdicts and not one.reason
    assert other.points == other.max_points


@pytest.mark.parametrize("name", HONEST)
def test_honest_work_gets_every_point(tmp_path, name):
    lab, sources, numbers = HONEST[name]
    record = graded(tmp_path, lab, numbers, sources)
    assert [answer.points for answer in record.answers] == [answer.max_points for answer in record.answers]
