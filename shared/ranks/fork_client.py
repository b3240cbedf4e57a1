"""The kernel's side of the fork server (forkserver.py): sends requests, and keeps what it reports."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shared.deadlines import scaled
from shared.ranks import folders, forkserver, nccl
from shared.ranks.diagnosis import how_ended

START_TIMEOUT_S = scaled(60.0)
_ENDS_WITHIN_S = scaled(5.0)
_REAPED_WITHIN_S = scaled(1.0)  # A process closes its files a moment before its exit status is known.
_QUOTED_CHARACTERS = 2000  # of a log


class ForkServer:
    """The kernel's side of the fork server: sends requests, and keeps track of which processes started and ended.

    Args:
        run_dir: A folder for the logs and files of all processes.
        as_root: The beginning of a command that runs the rest of it as root.
        isolation: How to separate the ranks from each other, if at all: the `module` whose function `enter` every
            rank calls first, and what else that function needs to know.
        held: The open file with which all processes hold run_dir (see folders.py).
    """

    def __init__(
        self, run_dir: str, as_root: Sequence[str] = (), isolation: dict | None = None, held: int | None = None
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders.python_path()}
        if isolation:
            environment[forkserver.ISOLATION] = json.dumps(isolation)
        environment |= nccl.preloading()
        self.run_dir, self._as_root = run_dir, as_root
        self._held = held
        self.pids: dict[int, int] = {}  # rank → pid
        self.ended: dict[int, int] = {}  # pid → exit status; a negative one is the signal that ended the process
        self.rank_environment: dict[str, str] = {}  # variables that ranks get besides those of the kernel
        self._hosts: dict = {}  # the event that answers a request for hosts
        self._mps: dict = {}  # the event that answers a request for MPS
        self._changed = threading.Condition()
        self._silent = False  # whether the pipe for events has closed, which happens only when the process ends
        with open(os.path.join(run_dir, "forkserver.log"), "wb") as log:
            self._process: Any = self._start(environment, log)
        threading.Thread(target=self._listen, daemon=True, name="forkserver events").start()

    def _start(self, environment: dict[str, str], log: BinaryIO):
        """Start the process that serves the requests on its stdin. A subclass may fork it instead."""
        # With -P, Python does not begin its path with the current folder.
        return subprocess.Popen(
            [*self._as_root, sys.executable, "-P", "-m", "shared.ranks.forkserver", self.run_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=self.run_dir,  # so that a relative entry of Python's path leads to no student's file
            env=environment | {forkserver.FOLDER: folders.current()},
            start_new_session=True,  # Ctrl-C in a terminal should reach only the kernel
            pass_fds=[] if self._held is None else [self._held],
        )

    def request(self, **request) -> None:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self.last_words()) from None

    def send_signal(self, pid: int, number: int, group: bool = False) -> None:
        """Send a signal to a process, or to its whole process group. Do nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            try:
                (os.killpg if group else os.kill)(pid, number)
            except PermissionError:  # another user's process, which only the fork server may signal
                self.request(do="signal", pid=pid, number=number, group=group)

    def start_ranks(self, invitations: Sequence[tuple[int, bytes]]) -> None:
        """Start a rank for each port and token with which it connects to the kernel.

        Raises:
            RuntimeError: If a rank does not start.
        """
        self.pids.clear()
        self.request(
            do="ranks", invitations=[(port, token.hex()) for port, token in invitations], env=self.rank_environment
        )
        self.expect(lambda server: len(server.pids) == len(invitations), "The ranks did not start")

    def end_ranks(self) -> None:
        """Kill the ranks and what they have started, and wait until they have ended."""
        pids = [pid for pid in self.pids.values() if pid not in self.ended]
        for pid in pids:
            self.send_signal(pid, signal.SIGKILL, group=True)
        self.wait_for(lambda server: all(pid in server.ended for pid in pids), _ENDS_WITHIN_S)

    def make_hosts(self, ranks: int, bits_per_s: float, ranks_per_host: int = 1) -> None:
        """Create the hosts of the ranks that will be started.

        Raises:
            RuntimeError: If the hosts cannot be created.
        """
        self.request(do="hosts", n=ranks // ranks_per_host, bits_per_s=bits_per_s, ranks_per_host=ranks_per_host)
        self.expect(lambda server: server._hosts, "The ranks' hosts were not ready")
        if "no_hosts" in self._hosts:
            raise RuntimeError(f"The ranks' hosts could not be created: {self._hosts['no_hosts']}")

    def start_mps(self) -> str:
        """Start MPS, so that the next ranks use a GPU at the same time. Returns why it did not start, or ""."""
        self._mps = {}
        self.request(do="mps", folder=os.path.join(self.run_dir, "mps"))
        self.expect(lambda server: server._mps, "MPS did not answer")
        return self._mps.get("no_mps", "")

    @property
    def runs(self) -> bool:
        """Whether the fork server has not ended."""
        return not self._silent and self._process.poll() is None

    def expect(self, happened, otherwise: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until happened(self) is true.

        Raises:
            RuntimeError: If the fork server ends first, or timeout_s passes. The message quotes its log.
        """
        if not self.wait_for(happened, timeout_s):
            late = f"{otherwise} within {timeout_s:g} s. {self.end_of_log()}"
            raise RuntimeError(late if self.runs else self.last_words())

    def wait_for(self, happened, timeout_s: float) -> bool:
        """Wait until happened(self) is true, or cannot become true. Returns whether it did before timeout_s passed."""
        with self._changed:
            self._changed.wait_for(lambda: happened(self) or self._silent, timeout_s)
            return happened(self)

    def last_words(self) -> str:
        """Say how the fork server ended, and quote the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAPED_WITHIN_S)
        return f"The process that starts ranks {how_ended(self._process.poll())}. {self.end_of_log()}"

    def check(self, ranks: Iterable[int]) -> None:
        """Check that the fork server and these ranks are running.

        Raises:
            RuntimeError: If one of them has ended. The message quotes its log.
        """
        if not self.runs:
            raise RuntimeError(self.last_words())
        for rank in ranks:
            if (status := self.ended.get(self.pids[rank])) is not None:
                words = self.end_of_log(f"rank-{rank}")
                raise RuntimeError(f"Rank {rank} {how_ended(status)} while it was starting. {words}")

    def end_of_log(self, name: str = "forkserver") -> str:
        """Return the end of a process's log: its last words, if it has died."""
        log = Path(self.run_dir, f"{name}.log")
        return log.read_text(errors="replace", encoding="utf-8")[-_QUOTED_CHARACTERS:] if log.exists() else ""

    def close(self, timeout_s: float = _ENDS_WITHIN_S) -> None:
        """End every child by closing stdin, which also happens when the kernel dies."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)  # otherwise a zombie process remains
        # A fork server that was killed leaves its children running.
        for pid in {*self.pids.values(), *filter(None, [self._mps.get("mps")])} - set(self.ended):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _listen(self) -> None:
        for line in self._process.stdout:
            event = _event_in(line)
            with self._changed:
                if "hosts" in event or "no_hosts" in event:
                    self._hosts = event
                elif "mps" in event or "no_mps" in event:
                    self._mps = event
                elif "started" in event:
                    self.pids[event["started"]] = event["pid"]
                    self.ended.pop(event["pid"], None)  # of an earlier process: the system uses its numbers again
                elif "ended" in event:
                    self.ended[event["pid"]] = event["status"]
                self._changed.notify_all()
        with self._changed:
            self._silent = True
            self._changed.notify_all()


def _event_in(line: bytes) -> dict:
    """Return the fork server's event in a line, or {} for what a sitecustomize.py printed while Python was starting."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        return event if isinstance(event, dict) else {}
    return {}
