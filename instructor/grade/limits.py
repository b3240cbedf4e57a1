"""Limit a judge's rights and resources before it runs a student's code.

All child processes inherit these limits. sandbox.py watches the total memory and the time from outside.
"""

import contextlib
import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from shared.deadlines import scaled

_PR_SET_DUMPABLE = 4
NICENESS = 10  # With it, even hundreds of busy processes leave the machine usable.


@dataclass(frozen=True)
class Limits:
    """Limits for one student's checks. The defaults are several times what this course's solutions need."""

    seconds_each: float = scaled(180.0)  # wall clock time, for one exercise
    memory_bytes: int = 8_000_000_000  # of all processes together; less if the machine has less (machine_load.py)
    process_memory_bytes: int = 4_000_000_000
    processes: int = 300  # including threads; our solutions have about 50
    file_bytes: int = 100_000_000  # of one file; all files together stay below scratch_bytes
    scratch_bytes: int = 500_000_000
    all_files: int = 50_000
    cpu_s: int = 600  # of one process
    files: int = 1024  # open in one process


def bound(limits: Limits) -> None:
    """Limit the resources of this process and of all that it starts from now on."""
    for resource_type, maximum in (
        (resource.RLIMIT_DATA, limits.process_memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits.processes),
    ):
        _, hard = resource.getrlimit(resource_type)
        maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
        resource.setrlimit(resource_type, (maximum, maximum))
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # If memory runs out, the system ends this process, not the grader.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8", errors="replace")


def become(user: int) -> None:
    """Turn this process into another user's if it is root's, and hide its memory from all others."""
    if os.getuid() == 0:  # The limit on processes does not apply to root.
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if hasattr(ctypes.CDLL(None), "prctl"):
        # Otherwise another process of this user could write into our pipe through /proc.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
