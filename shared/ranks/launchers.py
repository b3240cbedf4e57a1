"""ipyparallel launchers that request processes from the fork server instead of starting new Python interpreters.

ipyparallel has launchers for SSH, MPI, Slurm, PBS and LSF. The two launchers in this module are for this machine. They
start the same `ipyparallel.Cluster` in a third of the time that ipyparallel's local launchers take.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ipyparallel.cluster.launcher import ControllerLauncher, EngineLauncher

from shared.deadlines import scaled
from shared.ranks import folders, forkserver, nccl
from shared.ranks.diagnosis import how_ended

START_TIMEOUT_S = scaled(60.0)
ASK_AGAIN_AFTER_S = 3.0
_REAPED_WITHIN_S = scaled(1.0)  # A process closes its files a moment before its exit status is known.
_QUOTED_CHARACTERS = 2000  # of a log


class ForkServer:
    """The kernel's side of the fork server: sends requests, and keeps track of which processes started and ended.

    Args:
        run_dir: A folder for the logs and files of all processes.
        as_root: The beginning of a command that runs the rest of it as root.
        isolation: How to separate the ranks from each other, if at all: the `module` whose function `enter` every
            process calls first, and what else that function needs to know.
        held: The open file with which all processes hold run_dir (see folders.py).
    """

    def __init__(
        self, run_dir: str, as_root: Sequence[str] = (), isolation: dict | None = None, held: int | None = None
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders.python_path()}
        if isolation:
            environment[forkserver.ISOLATION] = json.dumps(isolation)
        environment |= nccl.preloading()
        self.run_dir, self.isolation, self._as_root = run_dir, isolation, as_root
        self._held = held
        self.pids: dict = {}  # rank, or "controller" → pid
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
    def serves(self) -> bool:
        """Whether cells can reach the ranks: False once the fork server or the controller has died."""
        return self.runs and self.pids.get("controller") not in self.ended

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
        """Say how the fork server ended, or else the controller, and quote the end of its log."""
        if not self.runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAPED_WITHIN_S)
            return f"The process that starts ranks {how_ended(self._process.poll())}. {self.end_of_log()}"
        status = self.ended[self.pids["controller"]]
        return f"The process that connects ranks {how_ended(status)}. {self.end_of_log('controller')}"

    def check(self, ranks: Iterable[int]) -> None:
        """Check that the fork server, the controller and these ranks are running.

        Raises:
            RuntimeError: If one of them has ended. The message quotes its log.
        """
        if not self.serves:
            raise RuntimeError(self.last_words())
        for rank in ranks:
            if (status := self.ended.get(self.pids[rank])) is not None:
                words = self.end_of_log(f"rank-{rank}")
                raise RuntimeError(f"Rank {rank} {how_ended(status)} while it was starting. {words}")

    def end_of_log(self, name: str = "forkserver") -> str:
        """Return the end of a process's log: its last words, if it has died."""
        log = Path(self.run_dir, f"{name}.log")
        return log.read_text(errors="replace", encoding="utf-8")[-_QUOTED_CHARACTERS:] if log.exists() else ""

    def close(self, timeout_s: float = scaled(5.0)) -> None:
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


class _ForkedLauncher:
    """The common part of both launchers: the state that ipyparallel asks for, and sending signals by pid."""

    fork_server: ForkServer  # set on the launcher classes by `bound_to`
    state: str  # This attribute and the next two are ipyparallel's.
    identifier: str
    notify_stop: Callable[[dict], None]

    def _pids(self) -> list[int]:
        """Return the process ids of what this launcher started, from the fork server's events."""
        raise NotImplementedError

    def find_args(self):
        return ["fork server"]  # ipyparallel logs a command line, and there is none here

    def signal(self, sig: int) -> None:
        for pid in self._pids():
            if pid not in self.fork_server.ended:
                self.fork_server.send_signal(pid, sig, group=True)

    async def stop(self) -> None:
        self.signal(signal.SIGKILL)
        pids = self._pids()
        self.fork_server.wait_for(lambda server: all(pid in server.ended for pid in pids), 5.0)
        if self.state == "running":
            self.notify_stop({"exit_code": 0, "identifier": self.identifier})

    def poll(self):
        if not self.fork_server.runs:
            return "no fork server"  # ipyparallel waits until this is not None
        ended = [self.fork_server.ended.get(pid) for pid in self._pids()]
        return next((status for status in ended if status is not None), None)


class ForkedController(_ForkedLauncher, ControllerLauncher):
    """Starts ipyparallel's controller as one process with threads, instead of the default six processes."""

    def _pids(self):
        return [pid for name, pid in self.fork_server.pids.items() if name == "controller"]

    def start(self):
        argv = [*self.cluster_args, *self.controller_args]
        log = os.path.join(self.fork_server.run_dir, "controller.log")
        self.fork_server.pids.pop("controller", None)  # an earlier one may have ended while it was starting
        self.fork_server.request(do="controller", argv=argv, env=self.get_env(), log=log)
        self.fork_server.expect(lambda server: "controller" in server.pids, "The controller did not start")
        self.notify_start(self._pids()[0])


class ForkedRanks(_ForkedLauncher, EngineLauncher):
    """Starts a set of ranks by forking a process that already has torch in memory."""

    def _pids(self):
        return [pid for name, pid in self.fork_server.pids.items() if name != "controller"]

    def start(self, n: int):
        self.n = n
        for rank in range(n):  # ranks of an earlier set must not count as started
            self.fork_server.pids.pop(rank, None)
        argv = [*self.cluster_args, *self.engine_args, "--IPEngine.enable_nanny=False", "--log-level=WARN"]
        argv.append(f"--IPEngine.timeout={START_TIMEOUT_S:g}")  # by default, a rank waits 5 s for the controller
        env = {**self.get_env(), "IPP_CONNECTION_INFO": self.environment["IPP_CONNECTION_INFO"]}
        env |= self.fork_server.rank_environment
        self.fork_server.request(do="ranks", n=n, argv=argv, env=env, log_dir=self.fork_server.run_dir)
        self.fork_server.expect(lambda server: set(range(n)) <= set(server.pids), "The ranks did not start")
        self.notify_start(self._pids())


def bound_to(fork_server: ForkServer):
    """Return the two launcher classes, bound to one fork server, because two notebooks have two fork servers."""
    return (
        type("ForkedController", (ForkedController,), {"fork_server": fork_server}),
        type("ForkedRanks", (ForkedRanks,), {"fork_server": fork_server}),
    )


def free_ports(n: int) -> tuple[socket.socket, range]:
    """Choose n consecutive free ports below the range that the system assigns by itself.

    ipyparallel would choose a port, release it, and bind it a moment later. If another program takes the port in
    between, the ranks do not start.

    Returns:
        A socket that keeps these ports from all other sets of ranks until it is closed, and the ports.
    """
    block = n + 1  # No two sets share one, because the socket takes its first port.
    while True:
        first = block * random.SystemRandom().randrange(10_000 // block, 32_000 // block)  # not from a student's seed
        taken = socket.socket()
        ports = range(first + 1, first + block)
        try:
            taken.bind(("127.0.0.1", first))
        except OSError:
            taken.close()
            continue
        if all(_is_free(port) for port in ports):
            return taken, ports
        taken.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_for_registration(client, n: int, server: ForkServer, timeout_s: float, on_progress, connect=None):
    """Wait until n new engines have registered. Returns a client that knows them, and their ids.

    A client of ipyparallel asks the controller once which engines there are, and then listens for new ones. It never
    hears of an engine that registers between the two. So if engines are missing for long, another client asks again.

    Args:
        connect: Returns another client. None for a client that has listened since before the engines were started.

    Raises:
        RuntimeError: If a process ends first (the message quotes its log), or timeout_s passes.
    """
    began = asked = time.monotonic()
    while len(ids := client.ids) < n:
        on_progress(len(ids))
        server.check(range(n))
        if time.monotonic() > began + timeout_s:
            raise RuntimeError(f"Only {len(ids)} of {n} ranks answered within {timeout_s:.0f} s. {server.end_of_log()}")
        if connect is not None and time.monotonic() > asked + ASK_AGAIN_AFTER_S:
            client.close(linger=False)
            client, asked = connect(), time.monotonic()
        time.sleep(0.01)
    return client, ids
