"""Attacks on what connects ranks besides their process group, and on the record of their calls. None earns points.

Each one replaces average_gradients. `body` runs for each gradient, and then the names `world_size`, `rank`, `index` and
`parameter` are known. Names that reading the code would find are put together while it runs.
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
# by name: the code, the reason or evidence, and whether a tripwire ended the ranks
ATTACKS = {
    "listeners that are hidden": (
        f"""
        heard = {RECORD}.__dict__["_lis" + "teners"]
        hidden, heard[:] = heard[:], []
        dist.all_reduce(parameter.grad, group=group)
        heard[:] = hidden
        parameter.grad /= world_size
        """,
        "void: the code uses shared.wire.instrumentation.__dict__",
    ),
    "listeners, named": ("from shared.wire import instrumentation", "rejected: exercise 2.3, line 12 uses shared.wire"),
    "listeners through a function": (
        "reached = getattr(dist.ProcessGroup.send, '__glo' + 'bals__')",
        "void: the code uses __globals__",
    ),
    "listeners through operator": (
        "import operator\noperator.attrgetter('__glo' + 'bals__')(dist.ProcessGroup.send)",
        "void: the code uses __globals__",
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
        own = os.path.dirname(os.environ["HOME"])
        for file in range(1, 20):
            try:
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
    "its own memory": ("open('/proc/self/' + 'mem', 'rb')", "PermissionError"),
    "a library of its own": (
        """
        import _heapq, importlib.util, shutil
        own = shutil.copy(_heapq.__file__, os.environ["TMPDIR"])
        importlib.util.module_from_spec(importlib.util.spec_from_file_location("_heapq", own))
        """,
        "void: the code imports _heapq",
    ),
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
        "import socket\nsocket.create_server(('127.0.0.1', 0))",
        "void: the code uses socket.bind",
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
    "another library's sockets": (
        f"""
        import zmq
        kept = dist.__dict__.setdefault("kept", [])
        if not kept:
            kept.append(zmq.Context())
            kept.append(kept[0].socket(zmq.PUSH if rank else zmq.PULL))
            below = super(zmq.Socket, kept[1])  # The tripwire is in zmq.Socket.
            below.bind("tcp://127.0.0.1:45678") if rank == 0 else below.connect("tcp://127.0.0.1:45678")
            kept[1].send(bytes(1000)) if rank else kept[1].recv()
        {textwrap.indent(RIGHT, "        ").strip()}
        """,
        "connections that belong to no process group",
    ),
    "other code in a function of torch": (
        "setattr(dist.all_reduce, '__co' + 'de__', (lambda tensor, **_: None).__class__)",
        "void: the code uses __code__",
    ),
    "code that it writes": ("exec('import gc')", "void: the code uses exec"),
    "code under the name of a library": (
        "import code\ncode.InteractiveInterpreter().runcode(compile('1', torch.__file__, 'exec'))",
        "void: the code runs code under the name",
    ),
    "a module that it writes": (
        f"""
        with open(f"{{os.environ['TMPDIR']}}/reaching.py", "w") as file:
            file.write('import sys\\ndef reach(): return {RECORD.replace('"', chr(92) + chr(39))}._listeners')
        sys.path.insert(0, os.environ["TMPDIR"])
        os.close(2)
        __import__("reaching").reach()
        """,
        "void: ",
    ),
    "frames": (
        """
        import traceback
        try:
            raise ValueError
        except ValueError as error:
            list(traceback.walk_tb(getattr(error, "__trace" + "back__")))
        """,
        "void: the code uses tb_frame",
    ),
    "frames of inspect": ("import inspect\ninspect.currentframe()", "void: the code uses sys._getframe"),
    "all objects": ("import gc\nvars(gc)['get_' + 'objects']()", "void: the code uses gc.get_objects"),
    "C": ("import ctypes\nctypes.CDLL(None)", "void: the code uses ctypes.CDLL"),
    "backends": (
        """
        backend = [each for each in dist.ProcessGroup.__dict__.values() if "_get_" + "backend" in str(each)][0]
        backend(group or dist.group.WORLD, torch.device("cpu")).allreduce([parameter.grad]).wait()
        parameter.grad /= world_size
        """,
        "",
    ),
    "ready-made code": (
        "torch.nn.parallel.DistributedDataParallel(module, process_group=group)",
        "rejected: exercise 2.3, line 12 uses DistributedDataParallel",
    ),
    "ready-made code, by another name": (
        "getattr(torch.nn.parallel, 'Distributed' + 'DataParallel')(module, process_group=group)",
        "void: the code uses DistributedDataParallel",
    ),
    "ready-made code in ready-made code": (
        "from torch.distributed._composable import replicate\nreplicate(module, device_mesh=None)\nmodule(parameter)",
        "",
    ),
    "torch's reducer": (
        "dist.Reducer([parameter], [[0]], [10**6], group or dist.group.WORLD)",
        "void: the code uses Reducer",
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
