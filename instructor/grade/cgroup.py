"""Bound the memory and processes of a sandbox with a control group, on systems where the grader may make one.

A control group counts what belongs to no process, too: detached shared memory, files in memory, and the system's own
memory for sockets and files. Sources: cgroups(7), and the kernel's documentation of versions 1 and 2.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from shared.deadlines import scaled

ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # Version 1 has a number of about this size instead of no limit.
MARGIN = 1.1  # The watcher ends a sandbox at its limit and explains why. The system's own limit is a bit higher.
MISSING = "No control group was available, so shared memory that no process holds was not counted."


@dataclass(frozen=True)
class Names:
    """The names of a version's files and counters."""

    memory_limit: str
    swap_limit: str
    processes_limit: str
    counters: tuple[str, ...]  # in memory.stat
    system_bytes: str  # a file with the system's own memory; "" if memory.stat has it
    events: str  # a file that counts the processes that the system ended


V1 = Names(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "pids.max",
    ("total_rss", "total_shmem"),
    "memory.kmem.usage_in_bytes",
    "memory.oom_control",
)
V2 = Names("memory.max", "memory.swap.max", "pids.max", ("anon", "shmem", "kernel"), "", "memory.events")


@dataclass(frozen=True)
class Group:
    """A control group of one sandbox."""

    folder: Path
    names: Names

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Set the limits. A system may lack the ones for swap and processes."""
        (self.folder / self.names.memory_limit).write_text(str(int(MARGIN * memory_bytes)), encoding="utf-8")
        swap_bytes = int(MARGIN * memory_bytes) if self.names is V1 else 0  # Version 1 adds memory and swap up.
        for name, value in ((self.names.swap_limit, swap_bytes), (self.names.processes_limit, 2 * processes)):
            with contextlib.suppress(OSError):
                (self.folder / name).write_text(str(value), encoding="utf-8")

    def held_bytes(self) -> int:
        """Return the memory that is held now. Cached files do not count, because the system can drop them."""
        lines = (line.split() for line in (self.folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        total_bytes = sum(int(value) for name, value in lines if name in self.names.counters)
        if self.names.system_bytes:
            total_bytes += int((self.folder / self.names.system_bytes).read_text(encoding="utf-8"))
        return total_bytes

    def has_run_out(self) -> bool:
        """Return whether the system has ended a process of the group, because the group reached its memory limit."""
        lines = (line.split() for line in (self.folder / self.names.events).read_text(encoding="utf-8").splitlines())
        return any(name == "oom_kill" and int(count) > 0 for name, count in lines)

    def remove(self) -> None:
        """Remove the group. Its processes have been killed, but the system needs a moment to end them."""
        deadline = time.monotonic() + scaled(5.0)
        while time.monotonic() < deadline:
            try:
                return self.folder.rmdir()
            except FileNotFoundError:
                return None
            except OSError:
                time.sleep(0.02)
        return None


def create(name: str, root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Group | None:
    """Create a group inside the grader's own group or one above it. Returns None where this is not allowed."""
    for above, names in _places(root, own):
        folder = above / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if os.access(folder / names.memory_limit, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK):
            return Group(folder, names)
        folder.rmdir()
    return None


def limit_bytes(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return how much memory this process's groups allow it, or None if there is no limit.

    A container may see only its own group, as the root of the hierarchy, so that is read too.
    """
    found = []
    for folder, names in _places(root, own):
        with contextlib.suppress(OSError, ValueError):
            found.append(int((folder / names.memory_limit).read_text(encoding="utf-8")))  # "max" in version 2
    return min((limit for limit in found if limit < _UNLIMITED), default=None)


def _places(root: Path, own: Path):
    """Yield the folders in which a group could be created, and their version's names."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = root / controllers if controllers else root
        folder = hierarchy / path.lstrip("/")
        while folder.is_relative_to(hierarchy):
            yield folder, V1 if controllers else V2
            folder = folder.parent
