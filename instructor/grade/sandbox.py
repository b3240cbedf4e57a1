"""Run a program in an isolated process tree with limits.

bubblewrap isolates it. The program has its own process ids, so that one kill ends all of its processes, and no network
except loopback. It can read only the system's libraries, this Python and the files it is given, and it can write only
to a scratch folder in memory.
"""

import contextlib
import json
import os
import random
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from instructor.grade.limits import Limits
from shared import deadlines
from shared.deadlines import scaled

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/hosts", "/etc/nsswitch.conf")
FIRST_USER, USERS = 200_000, 100_000  # User ids that nobody else has. No two sandboxes share a user or its limits.
WATCH_EVERY_S = 0.2
MOST_LINE_BYTES = 2_000_000
KEPT_BYTES = 4000  # of the printed output: enough for a traceback


class NoSandbox(RuntimeError):
    """Nothing can be isolated on this machine; the message says why and what to do."""


@dataclass
class Ended:
    """How a program ended: the lines it reported, and why we ended it ("" if it ended by itself)."""

    lines: list[dict] = field(default_factory=list)
    why: str = ""
    printed: str = ""
    status: int | None = None


def require() -> None:
    """Check that bubblewrap works here.

    Raises:
        NoSandbox: if bubblewrap is missing, or may not create namespaces.
    """
    if shutil.which("bwrap") is None:
        raise NoSandbox(
            "grading runs students' code in a sandbox, which needs bubblewrap (Linux only): apt-get install bubblewrap"
        )
    command = ["bwrap", *_isolation(), *_shown([]), "--", "/bin/true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=scaled(20))
    if tried.returncode:
        raise NoSandbox(
            f"bubblewrap cannot create a sandbox here ({tried.stderr.strip()}); run as a user who may create namespaces"
        )


def run(module: str, job: dict, course: Path, limits: Limits) -> Ended:
    """Run `python -m module JOB FD` in a sandbox where `course` is the working directory.

    The program is killed if it reports nothing for limits.seconds_each, uses too much memory, or starts too many
    processes.
    """
    user = FIRST_USER + random.SystemRandom().randrange(USERS)
    with tempfile.TemporaryDirectory(prefix="grade-") as temporary:
        folder = Path(temporary)
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(job | {"limits": vars(limits), "user": user}))
        scratch = folder / "scratch"
        scratch.mkdir()
        os.chmod(folder, 0o755)
        reads, writes = os.pipe()
        command = [
            "bwrap",
            *_isolation(),
            *_shown([course, job_file]),
            *_scratch(scratch, limits),
            "--chdir",
            str(course),
        ]
        command += ["--", sys.executable, "-m", module, str(job_file), str(writes)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[writes]
            )
        finally:
            os.close(writes)
        with process, open(reads, "rb", buffering=0) as pipe:
            try:
                return _follow(process, pipe, limits)
            finally:
                process.kill()  # This also kills everything that it has started, since it owns their process ids.


def _isolation() -> list[str]:
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:  # The judge itself changes its user: the limit on processes does not apply to root.
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", str(FIRST_USER), "--gid", str(FIRST_USER)]
    return [*options, "--die-with-parent", "--new-session", "--clearenv", "--hostname", "localhost"]


def _shown(files: list[Path]) -> list[str]:
    """Return the options that show files to the program, each under its own path and read-only."""
    python = {str(Path(path).resolve()) for path in (sys.base_prefix, sys.base_exec_prefix)} | {sys.prefix}
    options = ["--dev", "/dev", "--proc", "/proc"]
    shown = [*sorted(python), *map(str, files)]
    parents = {str(parent) for path in (*SYSTEM, *shown) for parent in Path(path).parents if parent != Path("/")}
    for parent in sorted(parents):
        options += ["--perms", "0755", "--dir", parent]  # By default, only root could enter them.
    for path in (*SYSTEM, *shown):
        options += ["--ro-bind-try" if path in SYSTEM else "--ro-bind", path, path]
    return options


def _scratch(scratch: Path, limits: Limits) -> list[str]:
    """Return the options for the scratch folder, the only writable one, and for the environment."""
    environment = {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "USER": "student",
        "LANG": "C.UTF-8",
        "RANKS_BACKEND": "gloo:cpu",
        "OMP_NUM_THREADS": "1",  # Otherwise libraries start a thread per core, and threads are limited.
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        deadlines.SCALE: f"{deadlines.time_scale():g}",
    }
    options = []
    for writable in (str(scratch), "/dev/shm", "/tmp"):
        if writable == "/tmp" and str(scratch).startswith("/tmp/"):
            continue  # A new /tmp would cover the scratch folder.
        options += ["--size", str(limits.scratch_bytes), "--perms", "0777", "--tmpfs", writable]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]  # They are in memory, and their size has no limit.
    return options + [word for name, value in environment.items() for word in ("--setenv", name, value)]


def _follow(process: subprocess.Popen, pipe, limits: Limits) -> Ended:
    """Read what the program reports until it ends or exceeds a limit."""
    ended = Ended()
    partial_line, printed = b"", b""
    deadline = time.monotonic() + limits.seconds_each
    with selectors.DefaultSelector() as selector:
        for stream in (pipe, process.stdout):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        looked = time.monotonic()
        while selector.get_map() and not ended.why:
            for key, _ in selector.select(WATCH_EVERY_S):
                chunk = key.fileobj.read(1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    printed = (printed + chunk)[-KEPT_BYTES:]
                else:
                    *lines, partial_line = (partial_line + chunk).split(b"\n")
                    for line in lines:
                        ended.lines.append(json.loads(line))
                        deadline = time.monotonic() + limits.seconds_each
            now = time.monotonic()
            if len(partial_line) > MOST_LINE_BYTES:
                ended.why = "the code's results are too long to report"
            if now > deadline:
                ended.why = f"no result was reported within {limits.seconds_each:g} s"
            if now - looked > WATCH_EVERY_S:
                looked, ended.why = now, ended.why or _passed_limit(process, limits)
    if ended.why:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended.status = process.wait(scaled(10))
    ended.printed = printed.decode(errors="replace")
    return ended


def _passed_limit(process: subprocess.Popen, limits: Limits) -> str:
    """Return which limit all processes together have exceeded, or ""."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return ""
    if len(family) > limits.processes:
        return f"the code had {len(family)} processes; the limit is {limits.processes}"
    held_bytes = 0
    for member in family:
        with contextlib.suppress(psutil.Error, OSError):
            memory = member.memory_info()
            held_bytes += memory.rss - memory.shared + _shared_bytes(Path("/proc", str(member.pid)))
    if held_bytes > limits.memory_bytes:
        return f"its processes held {held_bytes / 1e9:.1f} GB; the limit is {limits.memory_bytes / 1e9:.1f} GB"
    return ""


def _shared_bytes(process: Path) -> int:
    """Return the bytes of shared memory that a process holds, to which none of the system's limits applies.

    Counts mapped shared memory and memory files that are not mapped, but not the libraries that all processes share.
    """
    mapped = re.findall(
        r"^RssShmem:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE
    )  # absent after the process has ended
    files = {}
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("/memfd:"):
                status = descriptor.stat()
                files[status.st_ino] = 512 * status.st_blocks
    return 1024 * sum(map(int, mapped)) + sum(files.values())
