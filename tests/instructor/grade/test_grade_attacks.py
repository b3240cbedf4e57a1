"""Attacks against the sandbox and the measurement from outside. None earns points or does harm.

Each attack is in exercise 2.3 or 2.5, in which the gradients of a model are averaged. Names that reading the code would
find are put together while it runs. What code forges inside its own process is not looked for: see
`instructor/grade/__init__.py`.
"""

import os
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from instructor.grade import cgroup, course, grading, network_meter
from instructor.grade.limits import Limits
from shared.deadlines import scaled
from tests.handed_in import CHAPTERS, hand_in, left_over, need_sandbox, writes

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_of_our_own")]

LAB = "02_manual_ddp"
CELLS = {  # of exercises 2.3 and 2.5, each with the head of its function
    "average_gradients": "average_gradients(module, group=None)",
    "weighted": "average_gradients_weighted(module, samples, group=None)",
}
TOP = """%%ranks
import os, time

def each(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter

def {head}:
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    for index, parameter in enumerate(each(module)):
"""
# Tries every way to reach something outside its own process, and lists what it could reach.
REACHES = """
reached = []

def tries(name, reach):
    try:
        if reach():
            reached.append(name)
    except (OSError, ValueError):
        pass

own = os.path.dirname(os.environ["HOME"])
here = f"{os.environ['TMPDIR']}/{index}"
torch.save(parameter.grad, f"{here}-{rank}")
open(f"/dev/shm/{index}-{rank}", "w").close()
if rank == 0:
    tries("shared memory", lambda: shared_memory.SharedMemory(f"value{index}", create=True, size=100))
dist.barrier(group)
for folder in (os.environ["TMPDIR"], "/dev/shm", "/tmp"):
    tries(f"files in {folder}", lambda: any(os.access(f"{folder}/{index}-{other}", 0) for other in others))
if rank > 0:
    tries("shared memory by name", lambda: shared_memory.SharedMemory(f"value{index}"))
for folder in (os.getcwd(), os.path.dirname(os.__file__), own):
    tries(f"folder {folder}", lambda: not open(f"{folder}/{rank}", "w").close())
for file in range(1, 20):
    tries("a log", lambda: stat.S_ISREG(os.fstat(file).st_mode) and not os.write(file, b"value"))
for name in os.listdir(own):
    tries(f"log {name}", lambda: name.startswith("rank-") and os.access(f"{own}/{name}", os.R_OK))
tries("terminals", lambda: os.openpty())
tries("its priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, 15) is None)
tries("local sockets", lambda: socket.socket(socket.AF_UNIX))
tries("datagrams", lambda: socket.socket(type=socket.SOCK_DGRAM))
tries("locks", lambda: fcntl.lockf(open(os.__file__), fcntl.LOCK_SH, 1000 + index, rank) is None)
for pid in {int(pid) for pid in os.listdir("/proc") if pid.isdigit()} | set(range(2, 60)):
    if pid in {int(thread) for thread in os.listdir("/proc/self/task")} | {os.getpid()}:
        continue
    tries(f"the signals of {pid}", lambda: os.kill(pid, 0) is None)
    tries(f"the owner of {pid}", lambda: os.stat(f"/proc/{pid}").st_uid != os.getuid())
    for name in ("mem", "maps", "environ"):
        tries(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    tries(f"the files of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
raise AssertionError(("reached", reached))
"""
HIDDEN = "the ranks report 0.00 MB that they sent in collectives, but the network carried"
ATTACKS = {
    "hidden calls of the backend": (
        """
        backend = getattr(group or dist.group.WORLD, "_get_" + "backend")(torch.device("cpu"))
        backend.allreduce([parameter.grad]).wait()
        parameter.grad /= world_size
        """,
        HIDDEN,
    ),
    "calls that were never made": (
        """
        import sys
        heard = sys.modules["shared." + "wire.instrumentation"].__dict__["_lis" + "teners"]
        dist.all_reduce(torch.zeros(1), group=group)
        for calls, _, _ in heard:
            vars(calls[-1])["payload_bytes"] = parameter.grad.nbytes
        parameter.grad /= world_size
        """,
        "but the network carried only",
    ),
    "sockets of its own": (
        """
        import socket
        kept = dist.__dict__.setdefault("kept", [])
        if world_size == 2 and not kept:
            if rank == 0:
                server = socket.create_server(("127.0.0.1", 45678))
            dist.barrier(group)
            kept.append(server.accept()[0] if rank == 0 else socket.create_connection(("127.0.0.1", 45678)))
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= world_size
        """,
        "connections that belong to no process group",
    ),
    "sockets that leave no trace": (
        """
        import socket, struct
        if world_size > 1:
            own = parameter.grad.contiguous().numpy().tobytes()
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", 45000 + rank))
            server.listen()
            dist.barrier(group)
            to = socket.create_connection(("127.0.0.1", 45000 + (rank + 1) % world_size))
            other, _ = server.accept()
            to.sendall(own)
            received = b""
            while len(received) < len(own):
                received += other.recv(1 << 20)
            dist.barrier(group)
            for end in (to, other):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()  # This resets the connection, so the system forgets it at once.
            server.close()
            dist.barrier(group)
            values = torch.frombuffer(bytearray(received), dtype=parameter.dtype).view(parameter.shape)
            parameter.grad.add_(values).div_(2)
        """,
        HIDDEN,
    ),
    "a flood of connections": (
        """
        import socket
        address = [store for _, store in dist.distributed_c10d._world.pg_map.values()][0]
        while hasattr(address, "underlying_store"):
            address = address.underlying_store
        held = [socket.create_connection((address.host, address.port)) for _ in range(150)]
        dist.all_reduce(parameter.grad, group=group)
        """,
        "",
    ),
    "values that are sent through the store": (
        """
        store = [store for _, store in dist.distributed_c10d._world.pg_map.values()][0]
        ranks_here = dist.get_process_group_ranks(group or dist.group.WORLD)
        counts = dist.__dict__.setdefault("counts", {})
        name = (group or dist.group.WORLD).group_name
        counts[name] = counts.get(name, 0) + 1
        key = f"{name}-{ranks_here}-{counts[name]}-"
        store.set(key + str(dist.get_rank()), parameter.grad.contiguous().numpy().tobytes())
        parts = [torch.frombuffer(bytearray(store.get(key + str(at))), dtype=parameter.dtype) for at in ranks_here]
        parameter.grad.copy_((sum(parts) / world_size).view(parameter.shape))
        dist.all_reduce(torch.zeros(1), group=group)
        """,
        "void: the code used the process group's store",
    ),
    "too many files": (
        """
        for number in range(10**6):
            open(f"{os.environ['TMPDIR']}/{rank}-{number}", "w").close()
        """,
        "No space left on device",
    ),
    "detached shared memory": (
        """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        for _ in range(40):
            segment = libc.shmget(0, ctypes.c_size_t(10**8), 0o1600)
            place = libc.shmat(segment, None, 0)
            ctypes.memset(place, 1, 10**8)
            libc.shmdt(ctypes.c_void_p(place))
        time.sleep(60)
        """,
        "its processes held",
    ),
}


TOGETHER = [  # which of these are in one notebook: the first in 2.3, the second in 2.5
    ("hidden calls of the backend", "calls that were never made"),
    ("sockets of its own",),
    ("sockets that leave no trace", "values that are sent through the store"),
    ("a flood of connections", "too many files"),
    ("detached shared memory",),
]
LIMITS = Limits(memory_bytes=3_000_000_000)


@pytest.fixture(scope="module")
def judged_with():
    need_sandbox()
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        yield unpacked


def tasks(judged_with, *numbers: str):
    return replace(judged_with, tasks=tuple(task for task in judged_with.tasks if task.number in numbers))


@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_an_attack_earns_nothing_and_harms_nobody(tmp_path, judged_with, names):
    if "detached shared memory" in names and not can_make_groups():
        pytest.skip("the grader may not create a control group on this system")
    numbers = ("2.3", "2.5")[: len(names)]
    sources = {}
    for name, (cell, head) in zip(names, CELLS.items(), strict=False):
        sources[cell] = TOP.format(head=head) + textwrap.indent(textwrap.dedent(ATTACKS[name][0]).strip(), " " * 8)
    submission = hand_in(tmp_path, "eve", LAB, writes(**sources))
    record = grading.grade(submission, tasks(judged_with, "2.1", *numbers, "2.6"), LIMITS)
    before, *attacks, after = record.answers
    for name, attack in zip(names, attacks, strict=True):
        evidence = "\n".join([attack.reason, *(verdict.evidence for verdict in attack.verdicts)])
        assert attack.points == 0 and ATTACKS[name][1] in evidence and evidence.strip(), (name, evidence)
    assert (before.points, after.points) == (before.max_points, after.max_points), record.why
    assert not left_over()


def test_a_rank_reaches_only_what_it_needs(tmp_path, judged_with):
    if os.getuid() != 0:
        pytest.skip("only root can give each rank a user of its own")
    source = f"""%%ranks
import fcntl, os, socket, stat
from multiprocessing import shared_memory

def average_gradients(module, group=None):
    rank, index = dist.get_rank(group), 0
    others = {{*range(dist.get_world_size(group))}} - {{rank}}
    if not others:
        return
    parameter = next(module.parameters())
    parameter.grad = torch.zeros_like(parameter)
{textwrap.indent(REACHES.strip(), "    ")}
"""
    submission = hand_in(tmp_path, "eve", LAB, writes(average_gradients=source))
    (answer,) = grading.grade(submission, tasks(judged_with, "2.3"), LIMITS).answers
    evidence = "\n".join([answer.reason, *(verdict.evidence for verdict in answer.verdicts)])
    assert answer.points == 0 and "('reached', [])" in evidence, evidence


def can_make_groups() -> bool:
    group = cgroup.create("grade-can-make-groups")
    if group:
        group.remove()
    return group is not None


def test_the_measurement_is_exact():
    """Outside the sandbox, other programs use loopback too, so this looks at one connection only."""
    if not network_meter.available():
        pytest.skip("this system does not count the bytes of connections")
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            ends = one.getsockname()[1], other.getsockname()[1]
            before = network_meter.read().by_end[ends].all_bytes
            one.sendall(bytes(123_456))
            left = 123_456
            while left:
                left -= len(other.recv(left))
            sent = network_meter.read().by_end[ends]
    assert sent.all_bytes - sent.again_bytes - before == 123_456


def test_a_connection_that_closes_slowly_counts_as_ended_from_the_beginning():
    """One end was closed before a measurement, the other one during it: an honest exercise was void, once."""
    if not network_meter.available():
        pytest.skip("this system does not count the bytes of connections")
    with socket.create_server(("127.0.0.1", 0)) as server:
        one, (other, _) = socket.create_connection(server.getsockname()), server.accept()
        ends = one.getsockname()[1], other.getsockname()[1]
        assert ends not in network_meter.read().ended
        for end in (one, other):
            end.close()
            deadline = time.monotonic() + scaled(10)
            while ends not in network_meter.read().ended and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ends in network_meter.read().ended


def test_only_bytes_between_ranks_count_and_only_once():
    """A connection that has closed since then, and bytes that were sent again, once counted as sent by ranks."""
    control, one, other = (5000, 7001), (7001, 5000), (7002, 7003)
    began = network_meter.Carried(1000, {control: network_meter.Sent(300, 0), (5000, 7009): network_meter.Sent(400, 0)})
    by_end = {control: network_meter.Sent(350, 10), one: network_meter.Sent(25, 5), other: network_meter.Sent(120, 20)}
    now = network_meter.Carried(1000 + 50 + 25 + 120, by_end)
    assert now.between_others(began, {5000}) == 100


@pytest.mark.parametrize(("owner", "counted"), [(os.getuid(), 0), (200_001, 900)])
def test_bytes_at_a_port_of_the_judge_count_if_a_rank_has_opened_it(owner, counted):
    """Bytes to a rank that had opened such a port were once not counted."""
    ends = (7001, 5000)
    by_end = {ends: network_meter.Sent(900, 0, 200_002), ends[::-1]: network_meter.Sent(0, 0, owner)}
    assert network_meter.Carried(900, by_end).between_others(network_meter.Carried(0, {}), {5000}) == counted


def test_packets_without_data_hide_no_bytes():
    """The two packets of a refused connection together have 4 bytes fewer of headers than the meter subtracts."""
    ends = (7001, 7002)
    by_end = {ends: network_meter.Sent(900, 0, 1), ends[::-1]: network_meter.Sent(0, 0, 2)}
    assert network_meter.Carried(-4_000, by_end).between_others(network_meter.Carried(0, {}), set()) == 900


@pytest.mark.parametrize(("users", "counted"), [((1, 1), 0), ((1, 2), 900), ((os.getuid(),) * 2, 900)])
def test_what_a_rank_sends_to_itself_does_not_count(users, counted):
    """IPython sent 40 kB in this way while code printed 20,000 lines, which was taken for values sent in secret."""
    ends = (7001, 7002)
    by_end = {ends: network_meter.Sent(900, 0, users[0]), ends[::-1]: network_meter.Sent(0, 0, users[1])}
    assert network_meter.Carried(900, by_end).between_others(network_meter.Carried(0, {}), set()) == counted


@pytest.mark.parametrize(("steps", "why"), [(38, ""), (0, "but the network carried 21.49 MB between them")])
def test_headers_of_many_calls_are_credible_only_in_a_long_training(monkeypatch, steps, why):
    """Parallel3D made so many small calls in 38 steps that our own code lost a check."""
    carried = iter([0, 21_490_000])
    monkeypatch.setattr(network_meter, "read", lambda: network_meter.Carried(next(carried), {}))
    meter = network_meter.Meter(lambda: SimpleNamespace(control_port=0, store_ports=[0], generation=0))
    assert meter.contradicts([(3_030_000.0, 0.0, 3_600)] * 4, steps).partition(", ")[2] == why


SMALL_MESSAGES = """
import socket
import subprocess
import sys
from instructor.grade import network_meter

with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
        for end in (one, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = network_meter.read()
        for _ in range(2000):
            one.sendall(bytes(30))
            other.recv(30)
            other.sendall(bytes(4))
            one.recv(4)
        print(network_meter.read().between_others(began, set()))
"""


def test_headers_do_not_count_as_messages():
    """Each of 4,000 headers once counted 14 bytes too few, so our own save_checkpoint lost a check."""
    need_sandbox()
    if not network_meter.available():
        pytest.skip("this system does not count the bytes of connections")
    command = ["bwrap", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-net", "--"]
    found = subprocess.run([*command, sys.executable, "-c", SMALL_MESSAGES], capture_output=True, text=True, check=True)
    assert 0.95 * 34 * 2000 < int(found.stdout) < 1.05 * 34 * 2000
