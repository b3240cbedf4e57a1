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
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from instructor.grade import cgroup
from instructor.grade.isolation import SHARED_FOLDERS
from instructor.grade.limits import Limits
from shared import deadlines
from shared.checks.engine.framework import WORLD_SIZES
from shared.deadlines import scaled

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/hosts", "/etc/nsswitch.conf")
FIRST_USER, USERS = 200_000, 100_000  # User ids that nobody else has. No two sandboxes share a user or its limits.
USERS_EACH = 1 + max(WORLD_SIZES)
WATCH_EVERY_S = 0.2
MOST_LINE_BYTES = 2_000_000
KEPT_BYTES = 4000  # of the printed output: enough for a traceback
STOPPED = "the grader was stopped"
READY = {"ready": True}  # the first line of every program. Until then, no student's code or data has been touched.
stopping = threading.Event()  # Once it is set, all programs are ended.
running: set[str] = set()  # the folders of the programs that run now


class NoSandbox(RuntimeError):
    """Nothing can be isolated on this machine; the message says why and what to do."""


@dataclass
class Ended:
    """How a program ended: the lines it reported, and why we ended it ("" if it ended by itself)."""

    lines: list[dict] = field(default_factory=list)
    why: str = ""
    printed: str = ""
    status: int | None = None
    bounded: bool = True  # whether a control group bounded all of its memory
    ran_out: str = ""  # what to say if the system ended one of its processes for want of memory


def in_container() -> bool:
    """Return whether a container is the sandbox, as GRADE_SANDBOX=container says.

    Then the judge runs as another user in this container. The container must hold nothing else that a student may not
    read, and it is thrown away afterwards. The network is whatever the container allows.
    """
    return os.environ.get("GRADE_SANDBOX") == "container" and os.getuid() == 0


def require() -> None:
    """Check that bubblewrap works here, or that a container is the sandbox.

    Raises:
        NoSandbox: if bubblewrap is missing, or may not create namespaces.
    """
    if in_container():
        parents = [*Path(sys.prefix).resolve().parents, *Path(sys.base_prefix).resolve().parents]
        hidden = [path for path in parents if not path.stat().st_mode & stat.S_IXOTH]
        if hidden:
            raise NoSandbox(
                f"the judge runs as another user, which cannot read this Python, because it cannot open {hidden[-1]}"
            )
        return
    if shutil.which("bwrap") is None:
        raise NoSandbox(
            "grading runs students' code in a sandbox, which needs bubblewrap (Linux only). "
            "To install it, run: apt-get install bubblewrap"
        )
    command = ["bwrap", *_isolation(), *_shown([]), "--", "/bin/true"]
    tried = subprocess.run(
        command, capture_output=True, text=True, timeout=scaled(20), encoding="utf-8", errors="replace"
    )
    if tried.returncode:
        raise NoSandbox(
            f"bubblewrap cannot create a sandbox here ({tried.stderr.strip()}); run as a user who may create namespaces"
        )


def run(
    module: str, job: dict, course: Path, limits: Limits, handed_in: int | None = None, time_scale: float | None = None
) -> Ended:
    """Run `python -m module JOB FD` in a sandbox where `course` is the working directory.

    The program is killed if it reports nothing for limits.seconds_each, uses too much memory, or starts too many
    processes.

    Args:
        handed_in: A file descriptor that the program may read. The job tells it the number.
        time_scale: By how much to multiply the program's own deadlines; by default, as COURSE_TIME_SCALE says.
    """
    time_scale = time_scale or deadlines.time_scale()
    limits = replace(limits, seconds_each=limits.seconds_each * time_scale / deadlines.time_scale())
    user = FIRST_USER + USERS_EACH * random.SystemRandom().randrange(USERS // USERS_EACH)
    users = [*range(user, user + USERS_EACH)]  # of the judge and of each rank
    with tempfile.TemporaryDirectory(prefix="grade-") as temporary:
        folder = Path(temporary)
        job_file = folder / "job.json"
        # Other programs of a container may send over its network, too.
        facts = {"limits": vars(limits), "handed_in": handed_in, "own_network": not in_container(), "users": users}
        job_file.write_text(json.dumps(job | facts), encoding="utf-8")
        scratch = folder / "scratch"
        scratch.mkdir()
        os.chmod(folder, 0o755)
        reads, writes = os.pipe()
        program = [sys.executable, "-m", module, str(job_file), str(writes)]
        environment = _environment(scratch, time_scale)
        if in_container():
            os.chmod(scratch, 0o777)  # for the judge, which is another user and makes it its own
            command = program
        else:
            shown = [*_shown([course, job_file]), *_scratch(scratch, limits, environment)]
            command = ["bwrap", *_isolation(), *shown, "--chdir", str(course), "--", *program]
        group = cgroup.create(folder.name)
        if group is not None:
            group.limit(limits.memory_bytes, limits.processes)
            command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.folder / "cgroup.procs"), *command]
        try:
            process = subprocess.Popen(
                command,
                cwd=course,
                env=environment if in_container() else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[file for file in (writes, handed_in) if file is not None],
                umask=0o022,  # Several users share the judge's files, also if the grader's own files are private.
                start_new_session=True,  # Ctrl-C in a terminal reaches a whole session. Only the grader must react.
            )
        finally:
            os.close(writes)
        running.add(temporary)
        with process, open(reads, "rb", buffering=0) as pipe:
            try:
                return _follow(Watched(process, group, limits, scratch), pipe)
            finally:
                running.discard(temporary)
                process.kill()  # This also kills everything that it has started, since it owns their process ids.
                _kill_all({*users})
                if group is not None:
                    group.remove()


def _kill_all(users: set[int]) -> None:
    """End all processes of a container's judge. Bubblewrap has ended all others already."""
    while alive := [
        each for each in psutil.process_iter(["uids"]) if each.info["uids"] and each.info["uids"].real in users
    ]:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=scaled(1))


def _isolation() -> list[str]:
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # The judge and each rank become other users, because the limit on processes does not apply to root.
    if os.getuid() == 0:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            options += ["--cap-add", capability]
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


def _environment(scratch: Path, time_scale: float) -> dict[str, str]:
    """Return all environment variables of the program."""
    return {
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
        deadlines.SCALE: f"{time_scale:g}",
    }


def _scratch(scratch: Path, limits: Limits, environment: dict[str, str]) -> list[str]:
    """Return the options for the scratch folder, the only writable one, and for the environment."""
    options = []
    for writable in (str(scratch), *SHARED_FOLDERS):
        if writable == "/tmp" and str(scratch).startswith("/tmp/"):
            continue  # A new /tmp would cover the scratch folder.
        options += ["--size", str(limits.scratch_bytes), "--perms", "0777", "--tmpfs", writable]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]  # They are in memory, and their size has no limit.
    return options + [word for name, value in environment.items() for word in ("--setenv", name, value)]


def _follow(watched: "Watched", pipe) -> Ended:
    """Read what the program reports until it ends or exceeds a limit."""
    process, limits = watched.process, watched.limits
    ended = Ended(bounded=watched.group is not None)
    partial_line, printed = b"", b""
    deadline = time.monotonic() + limits.seconds_each
    with selectors.DefaultSelector() as selector:
        assert process.stdout is not None  # It is a pipe.
        for stream in (pipe, process.stdout):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, stream)
        looked = time.monotonic()
        while selector.get_map() and not ended.why:
            for key, _ in selector.select(WATCH_EVERY_S):
                chunk = key.data.read(1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.data is process.stdout:
                    printed = (printed + chunk)[-KEPT_BYTES:]
                else:
                    *lines, partial_line = (partial_line + chunk).split(b"\n")
                    for line in lines:
                        ended.lines.append(json.loads(line))
                        deadline = time.monotonic() + limits.seconds_each
            now = time.monotonic()
            if stopping.is_set():
                ended.why = STOPPED
            if len(partial_line) > MOST_LINE_BYTES:
                ended.why = "the code's results are too long to report"
            if now > deadline:
                ended.why = f"no result was reported within {limits.seconds_each:g} s"
            if now - looked > WATCH_EVERY_S:
                looked, ended.why = now, ended.why or watched.passed_limit()
    if ended.why:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended.status = process.wait(scaled(10))
    ended.printed = printed.decode(errors="replace")
    ended.ran_out = watched.ran_out()
    return ended


@dataclass(frozen=True)
class Watched:
    """A running program and its limits."""

    process: subprocess.Popen
    group: cgroup.Group | None
    limits: Limits
    scratch: Path

    def passed_limit(self) -> str:
        """Return a message that says which limit all processes together have exceeded, or ""."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return ""
        if len(family) > self.limits.processes:
            return f"the code had {len(family)} processes; the limit is {self.limits.processes}"
        held_bytes = self.group.held_bytes() if self.group else _held_bytes(family)
        if held_bytes > self.limits.memory_bytes:
            held, limit = held_bytes / 1e9, self.limits.memory_bytes / 1e9
            return f"its processes held {held:.1f} GB; the limit is {limit:.1f} GB"
        files = 0 if in_container() else _files(family, self.scratch)
        if files > self.limits.all_files:
            return f"the code wrote {files:,} files; the limit is {self.limits.all_files:,}"
        return ""

    def ran_out(self) -> str:
        """Return what to say if the system was faster than this watcher and ended a process, or ""."""
        if self.group is None or not self.group.has_run_out():
            return ""
        limit = self.limits.memory_bytes / 1e9
        return f"its processes held more than the limit of {limit:.1f} GB, so the system ended one of them"


def _held_bytes(family: list[psutil.Process]) -> int:
    """Return the memory that processes hold. Shared memory that none of them has mapped or open does not count."""
    held_bytes = 0
    for member in family:
        with contextlib.suppress(psutil.Error, OSError):
            memory = member.memory_info()
            held_bytes += memory.rss - memory.shared + _shared_bytes(Path("/proc", str(member.pid)))
    return held_bytes


def _files(family: list[psutil.Process], scratch: Path) -> int:
    """Return how many files there are in the folders that the processes can write to; 0 if they cannot be read."""
    for member in reversed(family):  # The first ones belong to bubblewrap, and see other folders.
        root = f"/proc/{member.pid}/root"
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"{root}{scratch}"), os.stat(scratch)):
                continue  # Bubblewrap has not isolated it yet, so it sees the folders of this machine.
            seen = [os.statvfs(f"{root}{folder}") for folder in (scratch, *SHARED_FOLDERS)]
            return sum(status.f_files - status.f_ffree for status in seen)
    return 0


def _shared_bytes(process: Path) -> int:
    """Return the bytes of shared memory that a process holds, to which none of the system's limits applies.

    Counts mapped shared memory and memory files that are not mapped, but not the libraries that all processes share.
    """
    mapped = re.findall(
        r"^RssShmem:\s+(\d+) kB", (process / "status").read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )  # absent after the process has ended
    files = {}
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("/memfd:"):
                status = descriptor.stat()
                files[status.st_ino] = 512 * status.st_blocks
    return 1024 * sum(map(int, mapped)) + sum(files.values())
