"""Runs one command with a deadline, and ends every process that it leaves behind.

    python -m tests.gpu.supervisor ENDED.json SECONDS GRACE_SECONDS COMMAND ...

GRACE_SECONDS is how long the processes of a command may take to end after it has ended.

A rank or a notebook's kernel has its own session, and its parent may die before it does. This process therefore asks
Linux to make it the parent of all orphans among its descendants. They stay in its process tree, so none can escape.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared.deadlines import scaled

LAST_WORDS_S = scaled(2.0)  # for a command that is out of time to print where it is
ENDING_S = 20.0
POLL_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PROC = Path("/proc")


class Stopped(Exception):
    """Somebody wants this command to end."""


def main(argv: Sequence[str]) -> int:
    result, deadline_s, grace_s, *command = argv
    signal.signal(signal.SIGTERM, _stop)
    _adopt_orphans()
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    how, left = "ended", []
    try:
        if _wait(process, float(deadline_s)):
            left = _still_running_after(float(grace_s))
        else:
            how = "out of time"
            process.send_signal(signal.SIGABRT)  # Python then prints where each thread is (`-X faulthandler`)
            _wait(process, LAST_WORDS_S)
    except Stopped:
        how = "stopped"
    seconds = time.monotonic() - began_s
    survivors = end_all(process)
    ended = {"how": how, "status": process.returncode, "seconds": seconds, "left": left, "survivors": survivors}
    Path(result).write_text(json.dumps(ended))
    return 0


def _stop(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants, and end with our own parent. Only Linux can do this."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait(process: subprocess.Popen, seconds: float) -> bool:
    """Wait for a process to end, and collect adopted ones in the meantime. Returns whether it ended in time."""
    deadline_s = time.monotonic() + seconds
    while process.returncode is None and time.monotonic() < deadline_s:
        _reap(process)
        time.sleep(POLL_S)
    return process.returncode is not None


def _still_running_after(seconds: float) -> list[str]:
    """Wait for all descendants to end. Returns the command lines of those that are still running."""
    deadline_s = time.monotonic() + seconds
    while (running := descendants()) and time.monotonic() < deadline_s:
        _reap()
        time.sleep(POLL_S)
    return [_command_line(pid) for pid in running]


def end_all(process: subprocess.Popen) -> list[str]:
    """Kill a process, its group and all descendants of this process. Returns those that could not be killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _wait(process, ENDING_S)
    deadline_s = time.monotonic() + ENDING_S
    while (running := descendants()) and time.monotonic() < deadline_s:
        for pid in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(POLL_S)
    return [_command_line(pid) for pid in running]


def descendants() -> list[int]:
    """Return the descendants of this process that are still running."""
    children: dict[int, list[int]] = {}
    dead = set()
    for folder in _PROC.glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended in the meantime
            continue
        children.setdefault(int(parent), []).append(int(folder.name))
        if state in "ZX":
            dead.add(int(folder.name))
    found, todo = [], [os.getpid()]
    while todo:
        mine = children.get(todo.pop(), [])
        found += mine
        todo += mine
    return [pid for pid in found if pid not in dead]


def _reap(process: subprocess.Popen | None = None) -> None:
    """Collect the exit statuses of ended children: of adopted processes, which would stay zombies, and of process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if process is not None and pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)


def _command_line(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return f"process {pid}"
    return " ".join(words).strip()[:120] or f"process {pid}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
