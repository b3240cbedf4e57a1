"""Attacks on what connects ranks besides their process group, and on the record of their calls.

Each one replaces average_gradients. `body` runs for each gradient, and then the names `world_size`, `rank`, `index` and
`parameter` are known. Names that reading the code would find are put together while it runs. The attacks in ATTACKS
earn nothing. Those in LIMITS earn points, because Python has no walls inside a process. The notices name what a person
should look at.
"""

import textwrap
from dataclasses import replace

import pytest

from instructor.grade import course, grading
from instructor.grade.limits import Limits
from tests.handed_in import CHAPTERS, hand_in, left_over, need_sandbox, writes

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_of_our_own")]

LAB = "02_manual_ddp"
TOP = """
import os, sys

def average_gradients(module, group=None):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    for index, parameter in enumerate(module.parameters()):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
"""
RIGHT = "\ndist.all_reduce(parameter.grad, group=group)\nparameter.grad /= world_size\n"
RECORD = 'sys.modules["shared." + "wire.instrumentation"]'
HIDDEN = "the ranks report 0.00 MB that they sent in collectives, but the network carried"
# by name: the code, and a part of the reason or of the evidence
ATTACKS = {
    "listeners that are hidden": (
        f"""
        heard = {RECORD}.__dict__["_lis" + "teners"]
        hidden, heard[:] = heard[:], []
        dist.all_reduce(parameter.grad, group=group)
        heard[:] = hidden
        parameter.grad /= world_size
        """,
        HIDDEN,
    ),
    "listeners, named": ("from shared.wire import instrumentation", "rejected: exercise 2.3, line 12 uses shared.wire"),
    "globals, named in a text": (
        "getattr(dist.all_reduce, '__globals__')",
        "rejected: exercise 2.3, line 12 uses __globals__",
    ),
    "calls that were never made": (
        f"""
        heard = {RECORD}.__dict__["_lis" + "teners"]
        dist.all_reduce(torch.zeros(1), group=group)
        for calls, _, _ in heard:
            vars(calls[-1])["payload_bytes"] = parameter.grad.nbytes
        parameter.grad /= world_size
        """,
        "but the network carried only",
    ),
    "a key that is excluded": (
        """
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)):
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= world_size
        """,
        HIDDEN,
    ),
    "a record of fewer bytes": (
        f"""
        copies = torch.cat([parameter.grad.reshape(-1)] * 4)
        dist.all_reduce(copies, group=group)
        for calls, _, _ in {RECORD}.__dict__["_lis" + "teners"]:
            vars(calls[-1])["payload_bytes"] = parameter.grad.nbytes
        parameter.grad.copy_(copies[: parameter.numel()].view(parameter.shape) / world_size)
        """,
        "but the network carried",
    ),
    "other code in a function of torch": (
        f"""
        name = "__co" + "de__"
        setattr(dist.broadcast, name, getattr(lambda *_, **__: name, name))
        {textwrap.indent(RIGHT, "        ").strip()}
        """,
        "void: the code replaces functions that measure it: torch.distributed.broadcast",
    ),
    "a property in the record": (
        f"""
        kind = vars({RECORD})["Ca" + "ll"]
        kind.payload_bytes = property(lambda call: parameter.grad.nbytes, lambda *_: None)
        {textwrap.indent(RIGHT, "        ").strip()}
        """,
        "void: the code replaces functions that measure it: shared.wire.instrumentation.Call.payload_bytes",
    ),
    "files of another rank": (
        """
        torch.save(parameter.grad, f"{os.environ['TMPDIR']}/{index}-{rank}")
        open(f"/dev/shm/{index}-{rank}", "w").close()
        dist.barrier(group)
        names = [set(os.listdir(folder)) for folder in (os.environ["TMPDIR"], "/dev/shm", "/tmp")]
        own = {name for found in names for name in found if name.startswith(f"{index}-")}
        assert own != {f"{index}-{rank}"}, "only its own files"
        """,
        "only its own files",
    ),
    "the log of another rank": (
        """
        import stat
        own = os.path.dirname(os.environ["HOME"])
        for file in range(1, 20):
            try:
                if stat.S_ISREG(os.fstat(file).st_mode):  # Its own sockets also have numbers here.
                    os.write(file, b"value")
            except OSError:
                pass
        dist.barrier(group)
        reached = [name for name in os.listdir(own) if name.startswith("rank-") and os.access(f"{own}/{name}", os.R_OK)]
        raise AssertionError(("reached", reached))
        """,
        "('reached', [])",
    ),
    "terminals": ("os.openpty()", "FileNotFoundError"),
    "its priority": ("os.setpriority(os.PRIO_PROCESS, 0, 15)", "PermissionError"),
    "another client of the controller": (
        f"""
        import glob, ipyparallel
        folder = os.path.join(os.path.dirname(os.environ["HOME"]), "profile", "security")
        found = glob.glob(f"{{folder}}/*client.json")
        kept = dist.__dict__.setdefault("kept", [])
        kept += [ipyparallel.Client(found[0], timeout=5)] * (not kept)
        {textwrap.indent(RIGHT, "        ").strip()}
        """,
        "",
    ),
    "files in folders of the course": (
        """
        reached = []
        for folder in (os.getcwd(), os.path.dirname(__file__), os.path.dirname(os.environ["HOME"])):
            try:
                open(f"{folder}/{rank}", "w").close()
                reached.append(folder)
            except OSError:
                pass
        raise AssertionError(("reached", reached))
        """,
        "('reached', [])",
    ),
    "local sockets": (
        "import socket\nsocket.socket(socket.AF_UNIX).bind(f'\\0{index}-{rank}')",
        "PermissionError",
    ),
    "sockets of its own": (
        f"""
        import socket
        kept = dist.__dict__.setdefault("kept", [])
        if world_size == 2 and not kept:
            if rank == 0:
                server = socket.create_server(("127.0.0.1", 45678))
            dist.barrier(group)
            kept.append(server.accept()[0] if rank == 0 else socket.create_connection(("127.0.0.1", 45678)))
        {textwrap.indent(RIGHT, "        ").strip()}
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
    "datagrams": ("import socket\nsocket.socket(type=socket.SOCK_DGRAM)", "PermissionError"),
    "locks": ("import fcntl\nfcntl.lockf(open(os.__file__), fcntl.LOCK_SH, 1000 + index, rank)", "PermissionError"),
    "shared memory by name": (
        """
        from multiprocessing import shared_memory
        if world_size > 1 and rank == 0:
            shared_memory.SharedMemory(f"value{index}", create=True, size=100)
        dist.barrier(group)
        if world_size > 1 and rank == 1:
            shared_memory.SharedMemory(f"value{index}")
        """,
        "FileNotFoundError",
    ),
    "other processes": (
        """
        seen = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        reached = [pid for pid in seen if os.stat(f"/proc/{pid}").st_uid != os.getuid()]
        for pid in set(range(2, 60)) - {int(thread) for thread in os.listdir("/proc/self/task")}:
            try:
                os.kill(pid, 0)
                reached.append(pid)
            except OSError:
                pass
        raise AssertionError(("reached", reached))
        """,
        "('reached', [])",
    ),
    "ready-made code": (
        "torch.nn.parallel.DistributedDataParallel(module, process_group=group)",
        "rejected: exercise 2.3, line 12 uses DistributedDataParallel",
    ),
    "ready-made code, by another name": (
        "getattr(torch.nn.parallel, 'Distributed' + 'DataParallel')(module, process_group=group)",
        "expected at most",
    ),
}
REDUCED = """
        if world_size > 1:
            own, parameter.grad = parameter.grad, None
            reducer = dist.Reducer([parameter], [[0]], [10**6], group or dist.group.WORLD)
            reducer.prepare_for_backward([])
            (parameter * own).sum().backward()
"""
BY_ANOTHER_NAME = """
class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        broadcast_state(module, group)
        wrapper = getattr(torch.nn.parallel, "Distributed" + "DataParallel")
        options = {"find_unused_parameters": True, "broadcast_buffers": False}
        self.module, self.hidden = module, [wrapper(module, process_group=group, **options)]

    def forward(self, *inputs, **kwargs):
        return self.hidden[0](*inputs, **kwargs)

    def finish_gradient_sync(self):
        pass
"""
# by name: which exercise, its code, the checks that it still fails, and a notice to the instructor
LIMITS = {
    "torch's reducer": (
        "2.3",
        f"{TOP}{REDUCED}",
        [],
        "exercise 2.3, line 15 uses Reducer",
    ),
    "a ready-made wrapper": (
        "2.4",
        BY_ANOTHER_NAME,
        ["wire", "bf16"],
        "exercise 2.4, line 7 computes the name of an attribute",
    ),
}


@pytest.fixture(scope="module")
def judged_with():
    need_sandbox()
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        yield replace(unpacked, tasks=tuple(task for task in unpacked.tasks if task.number in ("2.3", "2.5")))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_nothing_and_harms_nobody(tmp_path, judged_with, name):
    body, reason = ATTACKS[name]
    source = f"%%ranks\n{TOP}{textwrap.indent(textwrap.dedent(body).strip(), '        ')}\n"
    submission = hand_in(tmp_path, "eve", LAB, writes(average_gradients=source))
    record = grading.grade(submission, judged_with, Limits())
    attack, honest = record.answers
    evidence, unharmed = ("\n".join([each.reason, *(v.evidence for v in each.verdicts)]) for each in record.answers)
    assert attack.points == 0, evidence
    assert honest.points == honest.max_points, unharmed
    assert reason in evidence and evidence.strip()
    assert not left_over()


@pytest.mark.parametrize("name", LIMITS)
def test_a_known_limit_earns_points_and_is_named_to_the_instructor(tmp_path, name):
    """Nothing inside the rank can prevent these. What they still cannot forge are values, and bytes on the network."""
    number, source, missed, notice = LIMITS[name]
    need_sandbox()
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        (task,) = (task for task in unpacked.tasks if task.number == number)
        submission = hand_in(tmp_path, "eve", LAB, writes(**{task.cells[0].replace("-", "_"): f"%%ranks\n{source}"}))
        record = grading.grade(submission, replace(unpacked, tasks=(task,)), Limits())
    (answer,) = record.answers
    assert [verdict.check for verdict in answer.verdicts if not verdict.passed] == missed, answer
    assert answer.points > 0 and not answer.reason
    assert notice in record.notices


LIES = """
class Small(torch.Tensor):
    @property
    def nbytes(self):
        return super().nbytes // 3

def average_gradients(module, group=None):
    for parameter in module.parameters():
        if parameter.requires_grad:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            three = torch.cat([own.reshape(-1)] * 3).as_subclass(Small)
            dist.all_reduce(three, group=group)
            mean = three.as_subclass(torch.Tensor)[: parameter.numel()] / dist.get_world_size(group)
            parameter.grad = mean.view(parameter.shape)
"""


def test_a_tensor_that_lies_about_its_size_pays_for_all_its_bytes(tmp_path, judged_with):
    submission = hand_in(tmp_path, "eve", LAB, writes(average_gradients=f"%%ranks\n{LIES}"))
    record = grading.grade(submission, replace(judged_with, tasks=judged_with.tasks[:1]), Limits())
    (answer,) = record.answers
    assert [verdict.check for verdict in answer.verdicts if not verdict.passed] == ["wire"], answer
    assert any("expected at most" in verdict.evidence for verdict in answer.verdicts)
