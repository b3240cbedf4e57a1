"""Run a program in a process tree of its own, with limits: it sees the files that it is shown, and ends when we say.

Isolation is bubblewrap's: own process ids, so that one kill ends all; loopback and no other network; of the file system
the system's libraries and this Python, read-only, and a scratch folder in memory.
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
FIRST_USER, USERS = 200_000, 100_000  # whom nobody has: two sandboxes share no user, nor its limits
WATCH_EVERY_S = 0.2
MOST_LINE_BYTES = 2_000_000
KEPT_BYTES = 4000  # of what is printed: enough for a traceback


class NoSandbox(RuntimeError):
    """Why nothing can be isolated here, and what to do."""


@dataclass
class Ended:
    """What became of a program: the lines it told, and why it was ended; "" if it ended by itself."""

    lines: list[dict] = field(default_factory=list)
    why: str = ""
    printed: str = ""
    status: int | None = None


def require() -> None:
    """Raises: NoSandbox where bubblewrap is missing, or not allowed to work."""
    if shutil.which("bwrap") is None:
        raise NoSandbox("Grading runs students' code, and needs bubblewrap for it (Linux): apt-get install bubblewrap")
    command = ["bwrap", *_isolation(), *_shown([]), "--", "/bin/true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=scaled(20))
    if tried.returncode:
        raise NoSandbox(
            f"bubblewrap is not allowed to isolate here ({tried.stderr.strip()}): run as a user who may make namespaces"
        )


def run(module: str, job: dict, course: Path, limits: Limits) -> Ended:
    """Run `python -m module JOB FD` in a sandbox where `course` is the working directory.

    It is ended when it tells nothing for limits.seconds_each, takes too much memory, or starts too many processes.
    """
    user = FIRST_USER + random.SystemRandom().randrange(USERS)
    with tempfile.TemporaryDirectory(prefix="grade-") as made:
        folder = Path(made)
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
                process.kill()  # and with it, all that it has started: they live in its process ids


def _isolation() -> list[str]:
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:  # the judge itself becomes nobody, since only so are its processes counted
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", str(FIRST_USER), "--gid", str(FIRST_USER)]
    return [*options, "--die-with-parent", "--new-session", "--clearenv", "--hostname", "localhost"]


def _shown(files: list[Path]) -> list[str]:
    """What can be read in there, each under its own path."""
    python = {str(Path(each).resolve()) for each in (sys.base_prefix, sys.base_exec_prefix)} | {sys.prefix}
    options = ["--dev", "/dev", "--proc", "/proc"]
    shown = [*sorted(python), *map(str, files)]
    for parent in sorted({str(each) for path in (*SYSTEM, *shown) for each in Path(path).parents if each != Path("/")}):
        options += ["--perms", "0755", "--dir", parent]  # bubblewrap would make them for root alone
    for path in (*SYSTEM, *shown):
        options += ["--ro-bind-try" if path in SYSTEM else "--ro-bind", path, path]
    return options


def _scratch(scratch: Path, limits: Limits) -> list[str]:
    """The one folder that can be written, and the environment."""
    environment = {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "USER": "student",
        "LANG": "C.UTF-8",
        "RANKS_BACKEND": "gloo:cpu",
        "OMP_NUM_THREADS": "1",  # or libraries would start a thread per core, and threads are limited
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        deadlines.SCALE: f"{deadlines.time_scale():g}",
    }
    options = []
    for place in (str(scratch), "/dev/shm", "/tmp"):
        if place == "/tmp" and str(scratch).startswith("/tmp/"):
            continue  # it is there already, and is not to be covered
        options += ["--size", str(limits.scratch_bytes), "--perms", "0777", "--tmpfs", place]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]  # they lie in memory, and would have no limit
    return options + [word for name, value in environment.items() for word in ("--setenv", name, value)]


def _follow(process: subprocess.Popen, pipe, limits: Limits) -> Ended:
    """Read what is told until the program has ended, or is ended."""
    ended = Ended()
    told, printed = b"", b""
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
                    *lines, told = (told + chunk).split(b"\n")
                    for line in lines:
                        ended.lines.append(json.loads(line))
                        deadline = time.monotonic() + limits.seconds_each
            now = time.monotonic()
            if len(told) > MOST_LINE_BYTES:
                ended.why = "what was found is too long to be told"
            if now > deadline:
                ended.why = f"nothing came of it in {limits.seconds_each:g} s"
            if now - looked > WATCH_EVERY_S:
                looked, ended.why = now, ended.why or _too_much(process, limits)
    if ended.why:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended.status = process.wait(scaled(10))
    ended.printed = printed.decode(errors="replace")
    return ended


def _too_much(process: subprocess.Popen, limits: Limits) -> str:
    """→ which limit all processes together have passed"""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return ""
    if len(family) > limits.processes:
        return f"it had {len(family)} processes"
    held_bytes = 0
    for each in family:
        with contextlib.suppress(psutil.Error, OSError):
            memory = each.memory_info()
            held_bytes += memory.rss - memory.shared + _shared_bytes(Path("/proc", str(each.pid)))
    if held_bytes > limits.memory_bytes:
        return f"its processes held {held_bytes / 1e9:.1f} GB"
    return ""


def _shared_bytes(process: Path) -> int:
    """→ what a process keeps in memory that others may see too: no limit of the system's holds for it

    Mapped, and as files in memory that are mapped nowhere; the libraries that all share are no part of it.
    """
    mapped = re.findall(r"^RssShmem:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE)  # none once it died
    files = {}
    for each in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(each).startswith("/memfd:"):
                found = each.stat()
                files[found.st_ino] = 512 * found.st_blocks
    return 1024 * sum(map(int, mapped)) + sum(files.values())
