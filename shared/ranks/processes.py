"""The processes behind a set of ranks: start, query, restart and end them, and notice when they die."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared import hosts
from shared.deadlines import scaled
from shared.ranks import folders, fork_client, nccl
from shared.ranks.devices import ONE_PROCESS_PER_GPU, Placement, place, valid_behind
from shared.ranks.diagnosis import CellState, explain
from shared.ranks.errors import RanksError
from shared.ranks.fork_client import START_TIMEOUT_S
from shared.ranks.lines import Exchange, Line

_LOOKS_EVERY_S = 0.02
_ANSWER_TIMEOUT_S = scaled(1.0)


def start_fork_server(link: str | None) -> fork_client.ForkServer:
    run_dir, held = folders.create()
    return fork_client.ForkServer(run_dir, as_root=hosts.as_root() if link else (), held=held)


@dataclass
class Surroundings:
    """What ranks are started from, and through which port they reach the store.

    A program that does not trust the code on its ranks sets `processes.surroundings` to others.
    """

    start_fork_server: Callable[[str | None], fork_client.ForkServer] = start_fork_server  # given the rate of the link
    port_for_ranks: Callable[[int], int] = int  # given the store's own port


surroundings = Surroundings()


def _in_a_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


class RankProcesses:
    """The world_size processes, each with its own variables, and the store for their rendezvous.

    `RankSet` adds the process group.
    """

    def __init__(
        self,
        world_size: int,
        backend: str | None,
        link: str | None,
        simulate: str | None,
        ranks_per_host: int = 1,
        report=lambda done: None,
    ):
        self.world_size, self._backend, self._simulate = world_size, backend, simulate
        self.link = link  # the rate of the link in front of each host; None if all ranks share one machine
        self.ranks_per_host = ranks_per_host
        self.starts = 1  # how many times the processes were started; variables do not survive a restart
        self._questions = 0
        self._report = report
        try:
            self._server = surroundings.start_fork_server(link)
        except OSError as error:
            raise RanksError(f"The ranks did not start, because the system did not allow it: {error}") from error
        self._run_dir = self._server.run_dir
        self._exchange = Exchange()
        self.control_port = self._exchange.port
        self._lines: list[Line] = []  # one for each rank, in rank order
        try:
            self.placement = self._place()  # imports torch, in parallel with the fork server
            if link:
                self._server.make_hosts(world_size, hosts.bits_per_s(link), ranks_per_host)
            self._host_store()
            self._start_where_possible(self._start_ranks)
        except BaseException as error:
            self.close()
            if isinstance(error, (RuntimeError, TimeoutError)):
                raise RanksError(f"The ranks did not start: {error}") from error
            raise

    # -- starting and stopping

    def _host_store(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store_ports = (self._store.port, surroundings.port_for_ranks(self._store.port))

    def _start_ranks(self) -> None:
        from shared.ranks import rankside

        self._share_gpus()
        ranks, self._lines = range(self.world_size), []
        self._server.start_ranks([self._exchange.invitation(rank) for rank in ranks])
        self.pids = [self._server.pids[rank] for rank in ranks]

        def watch(connected: int) -> None:
            self._report(connected)
            self._server.check(ranks)

        self._lines = self._exchange.lines(START_TIMEOUT_S, watch)
        self._store.set("asked", str(self._questions))
        address, devices = ("127.0.0.1", self.store_ports[-1]), self.placement.devices
        self._on_all(lambda rank: (rankside.initialize_rank, rank, devices[rank], address, self._sizes_path(rank)))

    def _place(self) -> Placement:
        placement = place(self.world_size, self._backend, self.link, self._simulate)
        if self.link and self.ranks_per_host > 1:
            return replace(placement, valid=valid_behind(self.link, self.ranks_per_host))
        return placement

    def _start_where_possible(self, start) -> None:
        """Start the ranks in their placement, or, if they fail there, in its fallback."""
        try:
            start()
        except (RuntimeError, TimeoutError) as error:
            if self.placement.fallback is None or not self._lines:  # without lines, no rank has started
                raise
            nccl.gave_up = f"NCCL did not start on a shared GPU ({_in_a_line(error)})"
            self.placement = self.placement.fallback.because(nccl.gave_up)
            self._replace_ranks()

    def _share_gpus(self) -> None:
        """Prepare the environment of ranks that will share GPUs over NCCL, and try to start MPS for them.

        No rank may be running: starting MPS ends the daemon that an earlier set of ranks has used.
        """
        ranks_per_gpu = self.placement.ranks_per_gpu
        self._server.rank_environment = nccl.environment(ranks_per_gpu) if ranks_per_gpu > 1 else {}
        if ranks_per_gpu > 1:
            self.placement = self.placement.on_shared_gpus(self._server.start_mps())

    def restart(self) -> None:
        """Replace every rank with a new process. Their variables are lost.

        Raises:
            RanksError: If the ranks do not start.
        """
        self.starts += 1
        # Choose devices again, because a GPU may have been lost.
        self.placement = self._place()
        try:
            self._start_where_possible(self._replace_ranks)
        except RanksError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise RanksError(f"The ranks did not start again: {error}") from error

    def _replace_ranks(self) -> None:
        self._server.end_ranks()
        self._start_ranks()

    def close(self) -> None:
        """End every process of this set."""
        self._exchange.close()
        self._server.close()

    # -- communicating with ranks

    def _on_all(self, request_of_rank, timeout_s: float = START_TIMEOUT_S) -> None:
        """Run a function of `rankside` on every rank.

        Raises:
            RanksError: If a rank dies or takes too long.
        """
        waiting = {rank: line.apply_async(*request_of_rank(rank)) for rank, line in enumerate(self._lines)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            if not self._server.runs:
                raise RanksError(self._server.last_words())
            ends = self._deaths() or time.monotonic() > deadline
            next(iter(waiting.values())).wait(_LOOKS_EVERY_S)
            for rank in [rank for rank, answer in waiting.items() if answer.ready() or ends]:
                try:
                    waiting.pop(rank).get(timeout=0)
                except Exception as error:  # the others would only wait for this rank
                    why = explain(CellState([], {}, deaths=self._deaths())) or error
                    if isinstance(error, TimeoutError) and not self._deaths():
                        why = f"it has not answered within {timeout_s:g} s."
                    if "busy or unavailable" in str(error):
                        why = f"{_in_a_line(error)}. {ONE_PROCESS_PER_GPU}"
                    raise RanksError(f"Rank {rank} did not become ready: {why}") from error

    def _deaths(self) -> dict[int, int]:
        return {rank: self._server.ended[pid] for rank, pid in enumerate(self.pids) if pid in self._server.ended}

    def _ask(self, question: str) -> dict:
        """Ask every rank's doctor thread. Returns each rank's position, or None for a rank that does not answer."""
        self._questions += 1
        index, deaths = self._questions, self._deaths()
        self._store.set("asked", str(index))
        self._store.set(f"ask/{index}", question)
        answers, deadline = {}, time.monotonic() + _ANSWER_TIMEOUT_S
        for rank in range(self.world_size):
            if rank in deaths:
                continue
            key = f"answer/{index}/{rank}"
            while not (answered := self._store.check([key])) and time.monotonic() < deadline:
                time.sleep(0.001)  # store.wait would log each timeout
            answers[rank] = json.loads(self._store.get(key)) if answered else None
            self._store.delete_key(key)
        self._store.delete_key(f"ask/{index - 100}")  # a slow thread may still read recent questions
        return answers

    def _sizes_path(self, rank: int) -> str:
        """Return the path of the file in which a rank records the sizes of its sends and receives."""
        return os.path.join(self._run_dir, f"sizes-{rank}")

    def _log_path(self, rank: int) -> str:
        return os.path.join(self._run_dir, f"rank-{rank}.log")

    def log_bytes(self, rank: int) -> int:
        """Return the size of a rank's log."""
        with contextlib.suppress(OSError):  # a cell may have removed it
            return os.path.getsize(self._log_path(rank))
        return 0

    def log_of(self, rank: int, begins: int = 0) -> str:
        """Return what a rank's process wrote outside Python's streams, such as C++ warnings or a crash, shortened.

        Args:
            begins: Leave out this many bytes from the log's beginning.
        """
        from shared.ranks import output

        with contextlib.suppress(OSError), open(self._log_path(rank), "rb") as log:
            return output.read(log.fileno(), begins, os.fstat(log.fileno()).st_size)
        return ""
