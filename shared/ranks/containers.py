"""How much memory is left in the control groups of this process, by which a container is limited.

Sources: cgroups(7), and the kernel's documentation of versions 1 and 2.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_NEEDED_BYTES, _WITH_TORCH_BYTES = 500_000_000, 250_000_000  # before and after this process has imported torch
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Version:
    """The names of a version's files, and of the cached files in memory.stat, which the system can drop."""

    limit: str
    used: str
    cached: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def left_bytes(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Return how much memory a container leaves to this process and its children, or None if the machine has less."""
    left = min(_left_in_groups(root, own), default=None)
    return left if left is not None and left < psutil.virtual_memory().available else None


def needed_bytes() -> int:
    """Return about how much memory a container must leave, so that ranks start. Measured with two and with four."""
    return _WITH_TORCH_BYTES if "torch" in sys.modules else _NEEDED_BYTES


def _left_in_groups(root: Path, own: Path) -> Iterator[int]:
    """Yield what is left in this process's group and in each one above it.

    A container may see only its own group, as the root of the hierarchy.
    """
    lines = []
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy, version = (root / "memory", _V1) if controllers else (root, _V2)
        for folder in (group := hierarchy / path.lstrip("/"), *group.parents):
            if not folder.is_relative_to(hierarchy):
                break
            with contextlib.suppress(OSError, ValueError):  # Version 2 writes "max" where there is no limit.
                limit_bytes, used_bytes = (
                    int((folder / name).read_text(encoding="utf-8")) for name in (version.limit, version.used)
                )
                yield max(0, limit_bytes - used_bytes + _cached_bytes(folder, version))


def _cached_bytes(folder: Path, version: _Version) -> int:
    pairs = (line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
    return next((int(value) for name, value in pairs if name == version.cached), 0)
