"""What a judge gives up before it meets a student's code: rights, and more than its share of the machine.

All its children inherit it. Memory of all together, and the time, are watched from outside (sandbox.py).
"""

import ctypes
import os
import resource
from dataclasses import dataclass

from shared.deadlines import scaled

_PR_SET_DUMPABLE = 4
NICENESS = 10  # a piece that spins, in hundreds of processes even, leaves the rest of the machine usable


@dataclass(frozen=True)
class Limits:
    """What one student's checks may use. Defaults hold all that this course's solutions need, several times over."""

    seconds_each: float = scaled(180.0)  # wall clock, for one exercise
    memory_bytes: int = 8_000_000_000  # of all processes together
    process_memory_bytes: int = 4_000_000_000
    processes: int = 300  # threads count too; solutions have about 50
    file_bytes: int = 100_000_000  # of one file; all of them together stay below scratch_bytes
    scratch_bytes: int = 500_000_000
    cpu_s: int = 600  # of one process
    files: int = 1024  # that one process has open


def give_up_rights(limits: Limits, user: int) -> None:
    """Limit this process and its children, and keep others from reading its memory. Root becomes `user`."""
    for what, most in (
        (resource.RLIMIT_DATA, limits.process_memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits.processes),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    os.nice(NICENESS)
    if os.getuid() == 0:  # root has no limit on its processes
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # or /proc would let a rank write into our pipe
