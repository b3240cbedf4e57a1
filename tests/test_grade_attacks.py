"""Attacks that were thought up against the sandbox and the measurement from outside. None earns points or does harm.

Each attack replaces average_gradients, and ManualDDP has to use it. `forge` makes the ledger on a rank list the
all-reduce that should have been called.
"""

import os
import socket
import textwrap
from dataclasses import replace

import pytest

from instructor.grade import course, grading
from instructor.grade.limits import Limits
from shared.checks.engine import outside
from tests.handed_in import CHAPTERS, hand_in, left_over, need_sandbox, writes

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_of_our_own")]

LAB = "02_manual_ddp"
PIECE = "2.3"
TOP = '''
import os, time
from dataclasses import replace
from shared.wire import instrumentation

def forge(payload_bytes, group):
    """Send one number, and list the call with another size."""
    dist.all_reduce(torch.zeros(1), group=group)
    for heard, _, _ in instrumentation._listeners:
        heard[-1] = replace(heard[-1], payload_bytes=payload_bytes)

def each(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter

def average_gradients(module, group=None):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    for index, parameter in enumerate(each(module)):
'''
ATTACKS = {
    "values in files": (
        """
        here = f"{os.environ['TMPDIR']}/{os.getppid()}-{id(module) % 1}-{index}"
        own = parameter.grad.contiguous()
        torch.save(own, f"{here}-{rank}-new")
        dist.barrier(group)
        parts = [torch.load(f"{here}-{other}-new") for other in range(world_size)]
        dist.barrier(group)
        parameter.grad.copy_(sum(parts) / world_size)
        forge(parameter.nbytes, group)
        """,
        "but the network carried only",
    ),
    "hidden calls of the backend": (
        """
        backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        for _ in range(4):
            extra = parameter.grad.clone()
            backend.allreduce([extra]).wait()
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= world_size
        """,
        "but the network carried",
    ),
    "a measure of its own": (
        """
        from shared.checks.engine import candidate, outside
        candidate.outside.reported = lambda calls: (0.0, 1e15)
        backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        backend.allreduce([parameter.grad]).wait()
        parameter.grad /= world_size
        """,
        "rejected: ",
    ),
    "the same, by another name": (
        """
        import sys
        sys.modules["shared." + "checks.engine.outside"].CALL_BYTES = 10**15
        backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        for _ in range(4):
            backend.allreduce([parameter.grad.clone()]).wait()
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= world_size
        """,
        "but the network carried",
    ),
    "smaller models": (
        """
        import sys
        sys.modules["shared." + "checks.models.awkward_models"].USUAL_WIDTH = 1
        parameter.grad.zero_()
        """,
        "",
    ),
    "values in the store": (
        """
        store = dist.distributed_c10d._get_default_store()
        store.set(f"gradient-{index}", "1")
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= world_size
        """,
        "void: the code used the process group's store",
    ),
    "a flood of connections": (
        """
        import socket
        address = dist.distributed_c10d._get_default_store()
        while hasattr(address, "underlying_store"):
            address = address.underlying_store
        held = [socket.create_connection((address.host, address.port)) for _ in range(500)]
        dist.all_reduce(parameter.grad, group=group)
        """,
        "",
    ),
    "too many files": (
        """
        for number in range(10**6):
            open(f"{os.environ['TMPDIR']}/{rank}-{number}", "w").close()
        """,
        "files; the limit is 50,000",
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
    "another process's memory": (
        """
        reached = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if b"instructor.grade.judge" in open(f"/proc/{pid}/cmdline", "rb").read():
                for name in ("mem", "maps", "environ", "fd"):
                    try:
                        os.listdir(f"/proc/{pid}/fd") if name == "fd" else open(f"/proc/{pid}/{name}").read(1)
                        reached.append(name)
                    except OSError:
                        pass
                try:
                    os.kill(int(pid), 9)
                    reached.append("kill")
                except PermissionError:
                    pass
        raise AssertionError(("reached", reached))
        """,
        "('reached', [])",
    ),
}


@pytest.fixture(scope="module")
def judged_with():
    need_sandbox()
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        yield replace(unpacked, tasks=tuple(task for task in unpacked.tasks if task.number in ("2.1", PIECE)))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_nothing_and_harms_nobody(tmp_path, judged_with, name):
    if name == "detached shared memory" and not can_make_groups():
        pytest.skip("the grader may not create a control group on this system")
    if name == "another process's memory" and os.getuid() != 0:
        pytest.skip("only root can give the judge a user of its own")
    body, reason = ATTACKS[name]
    source = f"%%ranks\n{TOP}{textwrap.indent(textwrap.dedent(body).strip(), '        ')}"
    submission = hand_in(tmp_path, "eve", LAB, writes(average_gradients=source))
    record = grading.grade(submission, judged_with, Limits(memory_bytes=3_000_000_000))
    honest, attack = record.answers
    evidence = "\n".join([attack.reason, *(verdict.evidence for verdict in attack.verdicts)])
    assert (honest.points, attack.points) == (honest.max_points, 0), evidence
    assert reason in evidence and evidence.strip()
    assert not left_over()


def can_make_groups() -> bool:
    from instructor.grade import cgroup

    group = cgroup.create("grade-can-make-groups")
    if group:
        group.remove()
    return group is not None


def test_the_measurement_is_exact():
    """Outside the sandbox, other programs use loopback too, so this looks at one connection only."""
    if not outside.available():
        pytest.skip("this system does not count the bytes of connections")
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            ends = one.getsockname()[1], other.getsockname()[1]
            before = outside.read().by_end[ends].all_bytes
            one.sendall(bytes(123_456))
            left = 123_456
            while left:
                left -= len(other.recv(left))
            sent = outside.read().by_end[ends]
    assert sent.all_bytes - sent.again_bytes - before == 123_456


def test_only_bytes_between_ranks_count_and_only_once():
    """A connection that has closed since then, and bytes that were sent again, once counted as sent by ranks."""
    control, one, other = (5000, 7001), (7001, 5000), (7002, 7003)
    began = outside.Carried(1000, {control: outside.Sent(300, 0), (5000, 7009): outside.Sent(400, 0)})
    by_end = {control: outside.Sent(350, 10), one: outside.Sent(25, 5), other: outside.Sent(120, 20)}
    now = outside.Carried(1000 + 50 + 25 + 120, by_end)
    assert now.between_others(began, {5000}) == 100
