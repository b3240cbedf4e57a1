"""A hostile submission gets a row with a reason, loses only its own exercise's points, and leaves nothing behind.

Hostile code is in the first exercises of lab 00, and a right answer in a later one.
"""

import enum
import io
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch

from instructor.grade import (
    assembly,
    cgroup,
    course,
    gradebook,
    grading,
    judge,
    safe_loading,
    sandbox,
    static_checks,
    submissions,
)
from instructor.grade import command as grade
from instructor.grade.limits import Limits
from instructor.grade.policy import Policy
from instructor.grade.records import Answer, Record, one_line
from shared.checks.engine import parcel
from shared.deadlines import scaled
from shared.ranks import rankside
from tests.handed_in import CHAPTERS, cells_of, hand_in, left_over, need_sandbox, pieces_of, writes

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_of_our_own")]

LAB = "00_ranks"
DEFAULTS = Limits()


@pytest.fixture(scope="module")
def whole():
    need_sandbox()
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        yield unpacked


@pytest.fixture(scope="module")
def judged_with(whole):
    return replace(whole, tasks=whole.tasks[:2])


EXERCISES = ("sum_over_ranks", "global_mean", "pass_right", "log_mean_loss")  # the first four of five


@pytest.fixture(scope="module")
def impatient():
    """The course with shorter deadlines, for code that never ends."""
    need_sandbox()
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        attempts = unpacked.folder / "shared" / "checks" / "engine" / "attempts.py"
        usual = attempts.read_text()
        assert usual.count("scaled(20.0)") == 1
        attempts.write_text(usual.replace("scaled(20.0)", "scaled(3.0)"))
        yield unpacked


def function(name: str, body: str) -> str:
    return f"%%ranks\n\ndef {name}(number, *_):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}"


def judged(folder, judged_with, body: str, limits=DEFAULTS):
    """Return the record of a submission whose sum_over_ranks has this body."""
    source = function("sum_over_ranks", body)
    return grading.grade(hand_in(folder, "eve", LAB, writes(sum_over_ranks=source)), judged_with, limits)


def explanation(answer) -> str:
    """Return what an exercise's row and page say."""
    return "\n".join([answer.reason, *(verdict.evidence for verdict in answer.verdicts)])


# As root, the grader gives each rank a user of its own, so there is nothing that it could kill, and its code continues.
KILLS_ALL = "returned" if os.getuid() == 0 else "killed from inside the sandbox"
# Sends something over the connection on which the judge expects a rank's answers. Only this one has a deadline.
ON_THE_LINE = """
        import os, pickle, socket, struct
        forged = pickle.dumps((False, number))
        for file in range(3, 200):
            try:
                line = socket.socket(fileno=os.dup(file))
                if any(line.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)):
                    line.sendall({})
            except OSError:
                pass
        return number
        """
DRIPS = """
    import os, socket, struct, threading, time
    def drip():
        for file in range(3, 200):
            try:
                line = socket.socket(fileno=os.dup(file))
                if any(line.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)):
                    line.sendall(struct.pack("!i", 2**30))
                    while True:
                        line.sendall(b"x")
                        time.sleep(1)
            except OSError:
                pass
    threading.Thread(target=drip, daemon=True).start()
    time.sleep(3600)
"""
HOSTILE = {
    "sys.exit": ("import sys; sys.exit(0)", "SystemExit"),
    "os._exit": ("import os; os._exit(0)", "exited with status 0"),
    # Alone in its group, rank 0 may return its number before the judge sees that the idle ranks are dead.
    "kills all it can": ("import os; os.kill(-1, 9); return float(number)", KILLS_ALL),
    # As root, this stops only what the rank has started. Otherwise, it stops the judge, too.
    "stops all it can": ("import os, signal; os.kill(-1, signal.SIGSTOP)", ""),
    "an endless loop": ("import time\nwhile True: time.sleep(0.01)", "still running"),
    "a message that never ends": (DRIPS, ""),
    "10 GB": ("import torch; torch.ones(10 * 2**30, dtype=torch.uint8)", "ran out of memory"),
    "1 GB printed": ("for _ in range(1000): print('x' * 10**6)", "returned None"),
    "waits for nobody": (
        """
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            dist.barrier()
        return float(number)
        """,
        "Rank 0 waits in barrier",
    ),
    "a result whose pickle would run code": (
        """
        import os
        class Evil(float):
            def __reduce__(self):
                return os.system, ("kill -9 $PPID",)
        return Evil(1)
        """,
        "Evil; expected a float",
    ),
    "a pickle that runs code": (
        """
        import sys
        evil = b"cposix\\nsystem\\n(Vkill -9 $PPID\\ntR."
        class Evil:
            def __init__(self, stream, **_):
                self.dump = lambda result: stream.write(evil)
        sys.modules["shared" + ".checks.engine.parcel"]._Packer = Evil
        return 1.0
        """,
        "void: the code sent the grading process a pickle that would call posix.system there",
    ),
    "forged answers to its judge": (
        ON_THE_LINE.format("struct.pack('!i', 8 + len(forged)) + bytes(8) + forged"),
        "expected",
    ),
    "a message to its judge that is too long for any memory": (
        ON_THE_LINE.format("struct.pack('!iQ', -1, 2**62)"),
        "was stopped after",
    ),
    "a solution imported": (
        "from solutions.first_collectives import sum_over_ranks as s; return s(number)",
        "rejected: exercise 0.4, line 4 uses solutions.",
    ),
    "the same, hidden": (
        "import importlib; return importlib.import_module('solu' + 'tions.first_collectives').sum_over_ranks(number)",
        "No module named 'solutions.first_collectives'",
    ),
}


TOGETHER = [  # which of these are in one notebook
    ("forged answers to its judge", "a result whose pickle would run code", "the same, hidden", "a solution imported"),
    ("waits for nobody", "1 GB printed", "10 GB", "a pickle that runs code"),
    ("kills all it can", "sys.exit", "os._exit", "stops all it can"),
]
ENDLESS = ("an endless loop", "a message to its judge that is too long for any memory", "a message that never ends")


@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_hostile_code_loses_only_its_own_exercise(tmp_path, whole, names):
    check_that_each_loses_its_own_exercise(tmp_path, whole, names)


def test_code_that_never_ends_is_stopped_at_the_deadline_of_its_check(tmp_path, impatient):
    record = check_that_each_loses_its_own_exercise(tmp_path, impatient, ENDLESS)
    assert "no result was reported within" not in record.why


def check_that_each_loses_its_own_exercise(folder, judged_with, names) -> Record:
    sources = {exercise: function(exercise, HOSTILE[name][0]) for exercise, name in zip(EXERCISES, names, strict=False)}
    submission = hand_in(folder, "eve", LAB, writes(**sources))
    record = grading.grade(submission, judged_with, Limits(seconds_each=scaled(40)))
    for name, answer in zip(names, record.answers, strict=False):
        assert HOSTILE[name][1].casefold() in explanation(answer).casefold(), name
        assert answer.points == 0, name
    assert all(answer.points == answer.max_points for answer in record.answers[len(names) :])
    assert record.why.startswith("0.1 sum_over_ranks") and "\n" not in record.why
    assert not left_over()
    return record


def test_a_fork_bomb_is_stopped_by_the_limit_on_processes(tmp_path, impatient):
    # Lower than the defaults, because other tests run at the same time
    limits = Limits(memory_bytes=3_000_000_000, processes=90)
    two = replace(impatient, tasks=impatient.tasks[:2])
    record = judged(tmp_path, two, "import os\nwhile True: os.fork()", limits=limits)
    assert record.answers[0].points == 0 and explanation(record.answers[0])
    assert record.answers[1].points == 3, [verdict.evidence for verdict in record.answers[1].verdicts]
    assert not left_over()


def test_a_new_rank_ends_what_an_earlier_one_has_left_behind():
    """A forked child keeps its rank's connections, and once made the next exercise void."""
    if os.getuid() != 0:
        pytest.skip("only root can start processes of other users")
    user = sandbox.FIRST_USER + sandbox.USERS  # belongs to no sandbox
    left, other = (subprocess.Popen(["sleep", "60"], user=each) for each in (user, user + 1))
    starts = f"from instructor.grade.isolation import _become, _end_earlier_processes; _become({user})"
    starts += "; _end_earlier_processes(); print('here')"
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True)
    assert (left.wait(scaled(10)), other.poll(), done.stdout) == (-signal.SIGKILL, None, "here\n"), done.stderr
    other.kill()
    other.wait()


FILLS_FILES = """
for file in [os.memfd_create("x") for _ in range(9)]:
    while os.lseek(file, 0, os.SEEK_CUR) < 95e6:
        os.write(file, bytes(10**6))"""
HOARDS = {
    "sum_over_ranks": "held = bytearray(10**9)\nfor at in range(0, 10**9, 4096): held[at] = 1",
    "global_mean": "held = mmap.mmap(-1, 10**9)\nfor at in range(0, 10**9, 4096): held[at] = 1",
    "pass_right": FILLS_FILES,
}
LITTLE = Limits(memory_bytes=2_500_000_000, process_memory_bytes=2_000_000_000)


def hoarding(judged_with, name: str) -> str:
    """Return our own solution of an exercise, which also holds much memory if there are more than two ranks."""
    body = textwrap.indent(HOARDS[name].strip(), "        ")
    return f"""{judged_with.ours[name.replace("_", "-")]}

import mmap, os, time

def {name}(*arguments, right={name}):
    if dist.get_world_size() > 2:
{body}
        time.sleep(9)
    return right(*arguments)
"""


def test_memory_of_several_processes_is_added_up_shared_memory_too(tmp_path, whole):
    submission = hand_in(tmp_path, "eve", LAB, writes(**{name: hoarding(whole, name) for name in HOARDS}))
    record = grading.grade(submission, whole, LITTLE)
    hoarded, honest = record.answers[: len(HOARDS)], record.answers[len(HOARDS) :]
    assert all("its processes held" in answer.reason for answer in hoarded), record.why
    assert all(answer.points == answer.max_points for answer in honest)


def test_memory_is_explained_if_the_system_is_faster_than_the_watcher(tmp_path, whole, monkeypatch):
    group = cgroup.create("grade-can-make-groups")
    if group is None:
        pytest.skip("the grader may not create a control group on this system")
    group.remove()
    monkeypatch.setattr(sandbox.Watched, "passed_limit", lambda watched: "")
    submission = hand_in(tmp_path, "eve", LAB, writes(pass_right=hoarding(whole, "pass_right")))
    record = grading.grade(submission, replace(whole, tasks=whole.tasks[2:4]), LITTLE)
    hoarded, honest = record.answers
    assert "its processes held more than" in hoarded.reason and honest.points == honest.max_points


def test_only_folders_with_a_limit_can_be_written(judged_with):
    """Without root, the sandbox's user owns / and /dev inside it, so they must be read-only."""
    script = "import os; print(all(os.statvfs(path).f_flag & os.ST_RDONLY for path in ('/', '/dev', '/usr', '/etc')))"
    with tempfile.TemporaryDirectory() as scratch:
        options = [*sandbox._isolation(), *sandbox._shown([]), *sandbox._scratch(Path(scratch), DEFAULTS, {})]
        found = subprocess.run(["bwrap", *options, "--", sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "True\n", found.stderr


def test_files_of_this_machine_are_not_counted_before_a_process_is_isolated(tmp_path):
    """On a busy machine, a right submission once got no grade, because the machine had a million files."""
    assert sandbox._files([psutil.Process()], tmp_path) == 0


def test_a_judge_that_reports_nothing_is_killed(judged_with, tmp_path):
    """The job's file descriptor is a pipe to which nobody writes, so the reader waits for it."""
    limits = Limits(seconds_each=scaled(1))
    reads, writes_to = os.pipe()
    with open(reads, "rb"), open(writes_to, "wb"):
        ended = sandbox.run("instructor.grade.reader", {}, judged_with.folder, limits, reads)
    assert ended.why == f"no result was reported within {limits.seconds_each:g} s"
    assert not left_over()


def test_a_sandbox_shows_only_what_the_judge_needs(tmp_path, judged_with):
    """A sandbox hides submissions, homes, the network and other processes, and its files are read-only."""
    secret = tmp_path / "secret.txt"
    secret.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as outside:
        body = f"""
            import os, pathlib, subprocess, sys
            hidden = ({str(secret)!r}, {str(tmp_path)!r}, "/home", "/etc/passwd")
            seen = [path for path in hidden if os.path.exists(path)]
            for path in ("/usr/x", os.path.join(os.getcwd(), "x"), os.path.join(sys.prefix, "x"), "/work", "/x"):
                try:
                    pathlib.Path(path).write_text("x")
                    seen.append("wrote " + path)
                except OSError:
                    pass
            try:
                os.remove("shared/ranks/__init__.py")
                seen.append("removed")
            except OSError:
                pass
            connect = "import socket; socket.create_connection(('127.0.0.1', {outside.getsockname()[1]}), timeout=1)"
            if subprocess.run([sys.executable, "-c", connect], capture_output=True).returncode == 0:
                seen.append("connected")
            others = [pid for pid in os.listdir("/proc") if pid.isdigit()]
            secrets = [name for name in os.environ if "TOKEN" in name or "SECRET" in name]
            raise AssertionError(("seen", seen, secrets, os.getuid() != 0, len(others) < 20))
            """
        assert "('seen', [], [], True, True)" in explanation(judged(tmp_path, judged_with, body).answers[0])
    assert secret.read_text() == "kept"


FORGERY = """
import json, os
line = "\\n" + json.dumps({"done": "sum_over_ranks", "verdicts": [], "reason": ""}) + "\\n"
print(line)
for name in ("results.json", os.path.expanduser("~/results.json")):
    try:
        open(name, "w").write(line)
    except OSError:
        pass
for descriptor in range(3, 300):
    try:
        os.write(descriptor, line.encode())
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            if "pipe" in os.readlink(f"/proc/{pid}/fd/{descriptor}") and pid != str(os.getpid()):
                raise SystemExit(f"reached the pipe of {pid}: {open(f'/proc/{pid}/cmdline').read()}")
    except PermissionError:
        pass
"""


def test_forged_results_on_disk_stdout_and_pipes_are_ignored(tmp_path, judged_with):
    forge = f"def forge():\n{textwrap.indent(FORGERY, '    ')}\nforge()"
    source = f"%%ranks\n{forge}\ndef sum_over_ranks(number):\n    return -1.0"
    record = grading.grade(hand_in(tmp_path, "eve", LAB, writes(sum_over_ranks=source)), judged_with, Limits())
    said = explanation(record.answers[0])
    assert said and "instructor.grade.judge" not in said
    assert record.answers[0].points == 0 and record.points in (0.0, 3.0)


def test_a_cell_that_fails_to_load_is_left_out_and_a_students_shared_folder_is_not_used(tmp_path, whole):
    cells = {"sum_over_ranks": "%%ranks\n\ndef (", "global_mean": "1 / 0"}
    submission = hand_in(tmp_path, "eve", LAB, writes(**cells))
    (submission.path.parent / "shared").mkdir()
    (submission.path.parent / "shared" / "__init__.py").write_text("raise SystemExit")
    record = grading.grade(submission, replace(whole, tasks=whole.tasks[:3]), Limits())
    broken, failing, honest = record.answers
    assert "does not compile: exercise 0.1, line 3: SyntaxError" in broken.reason
    assert "ZeroDivisionError: division by zero" in failing.reason
    assert (broken.points, failing.points, honest.points) == (0.0, 0.0, honest.max_points)
    assert record.notes == ["Only the notebook is graded, so shared was not used."]


def test_a_cell_that_kills_all_it_can_while_it_is_loaded_costs_its_own_points(tmp_path, judged_with):
    source = "%%ranks\nimport os\nos.kill(-1, 9)\n\ndef sum_over_ranks(number):\n    pass"
    record = grading.grade(hand_in(tmp_path, "eve", LAB, writes(sum_over_ranks=source)), judged_with, Limits())
    assert record.answers[0].points == 0 and explanation(record.answers[0])
    assert record.points == (3 if os.getuid() == 0 else 0)
    assert not left_over()


def test_a_broken_machine_gives_no_grade(tmp_path, judged_with, monkeypatch):
    monkeypatch.setattr(sandbox, "SYSTEM", ("/usr",))  # Python cannot start without /lib64.
    with pytest.raises(grading.NotGraded, match="the judge did not start"):
        grading.grade(hand_in(tmp_path, "eve", LAB), judged_with, Limits())


def test_students_text_cannot_move_the_cursor_or_start_a_formula(tmp_path):
    evil = "\x1b[1A\rzoe 15/15\u202e\ud800 ;=HYPERLINK(1) ;\t@x" + "x" * 40_000
    record = Record("eve", LAB, "", [Answer("0.1", "piece", 0.0, 2.0, reason=evil)])
    line = grade._line(record, "1 of 1")
    assert line.isprintable() and len(line) < 3000 and line.encode()
    gradebook.write([record], tmp_path, Policy())
    for name in ("gradebook.csv", "exercises.csv"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert ";'=HYPERLINK(1) ; '@x" in text and len(text) < 6000
        assert not re.search(r"[,;][ \"]*[=+@-]", text), "a formula at the start of a cell"
    assert one_line("x;y") == "x;y" and one_line("\ud800") == ""


@pytest.fixture
def rejected(monkeypatch):
    """Install the guard for one test. Returns its list of rejected names."""
    for module in (pickle, parcel):
        for name in {"loads", "unpack"} & set(vars(module)):
            monkeypatch.setattr(module, name, getattr(module, name))  # so that it is restored after the test
    return safe_loading.install()


def test_a_pickle_cannot_change_a_class_of_the_judge(rejected):
    """Otherwise a rank could send a record that equals every expected value."""
    record = b"cshared.ranks.rankside\n_Here\n"
    for owner in (record, b"ccollections\nCounter\n", b"cshared.checks.engine.parcel\n_tensor\n"):
        with pytest.raises(safe_loading.Rejected):
            pickle.loads(owner + b"(N(V__sub__\n" + record + b"dtb" + b"0" + record + b")R.")
    assert len(rejected) == 3 and "__sub__" not in vars(rankside._Here)
    with pytest.raises(safe_loading.Rejected):  # the value of an Outcome is a pickle within its pickle
        rankside.Outcome(0).__setstate__({"value": b"cposix\ngetpid\n)R."})
    sent = {
        "call": rankside.Outcome(1, text="x"),
        "tensor": torch.ones(2),
        "counts": Counter(a=1),
        "size": torch.Size([2]),
    }
    found = pickle.loads(parcel.pack(sent))
    assert found["call"] == sent["call"] and torch.equal(found["tensor"], sent["tensor"])
    assert (found["counts"], found["size"], len(rejected)) == (sent["counts"], sent["size"], 4)


def test_a_pickle_of_records_and_tensors_does_not_need_the_slow_way(rejected):
    """Records and tensors are most of what ranks send."""
    sent = [rankside.Outcome(2, text="x"), parcel.pack({"loss": torch.arange(3.0)}), torch.float16, {"a": (1, None)}]
    found = safe_loading.Simple(io.BytesIO(pickle.dumps(sent))).load()
    assert type(found[0]) is rankside.Outcome and found[0] == sent[0] and found[2:] == sent[2:]
    assert torch.equal(safe_loading.Simple(io.BytesIO(found[1])).load()["loss"], torch.arange(3.0))


class Layout(NamedTuple):
    rows: int
    columns: int


class Kind(enum.IntEnum):
    MEAN = 3


# What students return, and the plain data that a check gets, in a notebook and in grading
RETURNED = [
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    ({np.int64(1): [np.float64(2.0)]}, {1: [2.0]}),
    (Layout(np.int32(1), Kind.MEAN), (1, 3)),
    (rankside.Outcome(np.int64(1), text="x"), rankside.Outcome(1, text="x")),
    (defaultdict(lambda: 0, a=1), {"a": 1}),
    (Counter("aab"), Counter("aab")),
    (True, True),
    ([Fraction(1, 3), Decimal("1.5"), 2 + 1j, {1, 2}], [Fraction(1, 3), Decimal("1.5"), 2 + 1j, {1, 2}]),
    (torch.tensor(3), torch.tensor(3)),
    (torch.tensor(True), torch.tensor(True)),
    (tuple(np.flatnonzero([0, 1, 1])), (1, 2)),
]


def test_plain_results_are_the_same_in_a_notebook_and_in_grading(rejected):
    for sent, expected in RETURNED:
        packed = parcel.pack(sent)
        for found in (pickle._loads(packed), parcel.unpack(packed)):
            assert found == expected and type(found) is type(expected), f"{sent!r} became {found!r}"
    array = parcel.unpack(parcel.pack(np.arange(6).reshape(2, 3)[:, 1:]))
    assert array.tolist() == [[1, 2], [4, 5]] and rejected == []


@pytest.mark.parametrize("thing", [object(), Layout, len, iter([1]), np.datetime64("2026"), lambda: 1])
def test_a_result_that_cannot_travel_is_named_on_the_rank(rejected, thing):
    """It gets the same verdict in a notebook, and nothing reaches the judge that could look like an attack."""
    with pytest.raises((TypeError, pickle.PicklingError), match="the result contains a"):
        parcel.pack([thing])
    assert rejected == []


# In a pickle, each of these follows a stand-in for a class or a function, and tries to reach the original.
OVER_A_STAND_IN = {
    "a state for the class": b"N}V__eq__\nNs\x86b.",
    "a state for it as a plain dict": b"}V__eq__\nNsb.",
    "an item of the class": b"V__eq__\nNs.",
    "an item that is appended to it": b"Na.",
    "items that are appended to it": b"(Ne.",
    "a state for the class that makes it": b"\x85cbuiltins\ntype\nq\x000N.",
}


@pytest.mark.parametrize("rest", OVER_A_STAND_IN.values(), ids=OVER_A_STAND_IN)
@pytest.mark.parametrize(
    "name", [b"shared.ranks.rankside\n_Here", *(b"shared.checks.engine.parcel\n_" + n for n in (b"tensor", b"plain"))]
)
def test_a_stand_in_does_not_lead_to_the_class_behind_it(rejected, name, rest):
    before = dict(vars(rankside._Here)), rankside._Here(rank=1), vars(safe_loading._maker_of(rankside._Here)).keys()
    with pytest.raises((safe_loading.Rejected, TypeError, AttributeError)):
        pickle.loads(b"\x80\x04c" + name + b"\n" + rest)
    after = dict(vars(rankside._Here)), rankside._Here(rank=1), vars(safe_loading._maker_of(rankside._Here)).keys()
    assert after == before and rankside._Here(rank=2) != before[1]


UNPREVENTED = {  # A process cannot prevent these in itself, so a person has to look.
    "from shared.wire import instrumentation as i\ni._listeners[-1][0].clear()": (
        "line 1 uses shared.wire.instrumentation"
    ),
    "import sys as s\ns.modules['shared.wire.instrumentation']": "line 1 uses sys",
    "import importlib as i\ni.import_module('sha' + 'red.wire.instrumentation')": "line 1 uses importlib",
    "__import__('shared.wire.instrumentation')": "line 1 uses __import__",
    "def f():\n    open('/tmp/x', 'w')": "line 2 uses open",
    "import mmap": "line 1 uses mmap",
    "from torch.nn.parallel import DistributedDataParallel as D": (
        "line 1 uses torch.nn.parallel.DistributedDataParallel"
    ),
    "torch.nn.parallel.DistributedDataParallel(x)": "line 1 uses DistributedDataParallel",
    "from shared import wire\nwire.instrumentation._listeners": "line 2 uses shared.wire.instrumentation",
    "import shared.wire as w\nx = w.instrumentation": "line 2 uses shared.wire.instrumentation",
    "getattr(nn.parallel, 'Distributed' + 'DataParallel')": "line 1 computes the name of an attribute",
    "torch.save(tensor, '/dev/shm/x')": "line 1 uses torch.save",
    "from torch import load as read": "line 1 uses torch.load",
    "import numpy as np\nnp.memmap('/dev/shm/x')": "line 2 uses numpy.memmap",
    "from torch.utils.data.distributed import DistributedSampler": (
        "line 1 uses torch.utils.data.distributed.DistributedSampler"
    ),
    "torch.distributed.utils._sync_module_states(module, group, 1, 0, ())": "line 1 uses _sync_module_states",
    "from torch.distributed.algorithms.model_averaging.utils import average_parameters": (
        "line 1 uses torch.distributed.algorithms.model_averaging.utils.average_parameters"
    ),
}


FROM_THE_REVIEW = {
    "error.__traceback__.tb_frame.f_back": ["__traceback__", "f_back", "tb_frame"],
    "dist.distributed_c10d._get_default_store().set('x', 'y')": ["_get_default_store"],
    "torch.os.kill(1, 9)": ["kill", "torch.os"],
}


@pytest.mark.parametrize("source", FROM_THE_REVIEW)
def test_ways_to_reach_the_probes_are_shown_to_the_instructor(source):
    assert static_checks.notices(source) == [f"line 1 uses {name}" for name in FROM_THE_REVIEW[source]]


@pytest.mark.parametrize("source", UNPREVENTED)
def test_uses_that_cannot_be_prevented_are_shown_to_the_instructor(source):
    assert UNPREVENTED[source] in static_checks.notices(source)
    assert (
        static_checks.notices("fully_shard(model, mesh=mesh)", "from torch.distributed.fsdp import fully_shard") == []
    )


@pytest.mark.parametrize("lab", CHAPTERS)
def test_honest_work_gets_no_notices(tmp_path, lab):
    submission = hand_in(tmp_path, "anna", lab)
    cells = pieces_of(submission)
    given = "\n".join(cell["source"] for cell in cells if not cell["grade_id"])
    assert [
        notice for cell in cells for notice in static_checks.notices(cell["source"], given) if cell["grade_id"]
    ] == []
    others = submissions.other_cells(cells_of(submission))
    assert assembly.from_other_cells(cells, others, [], judge.GIVEN) == []


def test_a_bomb_in_a_notebook_is_read_in_the_sandbox_and_stopped_there(tmp_path, judged_with):
    """Reading 20 MB of nested lists once took 43 s and 3.5 GB outside the sandbox."""
    submission = hand_in(tmp_path, "anna", LAB)
    submission.path.write_text('{"cells": [' + "[[[]]]," * 2_400_000 + "[]]}")
    before_bytes = psutil.Process().memory_info().rss
    record = grading.grade(submission, judged_with, Limits())
    assert record.points == 0 and record.reason and record.final
    assert psutil.Process().memory_info().rss - before_bytes < 100_000_000


def test_a_small_pickle_is_loaded_in_a_short_time(monkeypatch):
    """Each outcome holds a pickle, and many outcomes may share its bytes, so each level multiplies the time."""
    for module, name in ((pickle, "loads"), (parcel, "unpack")):
        monkeypatch.setattr(module, name, getattr(module, name))
    packed = pickle.dumps(None)
    safe_loading.install()
    for _ in range(3):
        outcome = b"cshared.ranks.rankside\nOutcome\n)\x81}X\x05\0\0\0valueh\1sb"
        packed = b"\x80\4B" + len(packed).to_bytes(4, "little") + packed + b"q\0010](" + 50 * outcome + b"e."
    began = time.monotonic()
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(packed)
    assert time.monotonic() - began < scaled(1.0)
