"""A set of ranks as the kernel sees it: a process group, cells with deadlines, and recovery from hangs and crashes."""

import json
import signal
import time
from typing import Any

from shared.deadlines import scaled
from shared.ranks import interrupts
from shared.ranks.definitions import Definitions, describe_restart
from shared.ranks.diagnosis import (
    CellState,
    explain,
    is_deadlocked,
    waits_for_a_dropped_handle,
    waits_for_nobody,
)
from shared.ranks.errors import CellFailed, RanksError
from shared.ranks.processes import RankProcesses
from shared.ranks.running import DEFAULT_TIMEOUT_S

JOIN_TIMEOUT_S = scaled(10.0)
NCCL_JOIN_TIMEOUT_S = scaled(90.0)  # NCCL loads its kernels and creates the communicator of all ranks
SHARED_JOIN_TIMEOUT_S = scaled(45.0)  # joining on a shared GPU takes 2 s on an H200, or forever if it is used up
_KEPT = "Your variables on the ranks are kept."
_USED_UP = (
    " All ranks have launched what the others wait for. They share a GPU, and NCCL hangs if its process groups use up "
    'that GPU. Start fewer ranks, form fewer groups, or use the CPU: ranks.start(…, backend="gloo:cpu").'
)
_NEW_GROUP = "A new process group is ready; your variables on the ranks are kept."
_DEFINE_TIMEOUT_S = scaled(20.0)
_DROPPED_S = scaled(3.0)  # how long ranks must make no progress before a dropped handle counts as the cause
# How long ranks must make no progress before they count as deadlocked. A busy machine can delay them, too.
_STILL_S = scaled(0.7)


class RankSet(RankProcesses):
    """A set of world_size processes in one process group. Students use `shared.ranks`, which holds one of these."""

    def __init__(
        self,
        world_size: int,
        backend=None,
        detect_mismatch=True,
        link=None,
        simulate=None,
        ranks_per_host=1,
        report=lambda done: None,
    ):
        self.options = (world_size, backend, detect_mismatch, link, simulate, ranks_per_host)
        self.detect_mismatch = detect_mismatch
        self.alive = False
        self.members = list(range(world_size))  # the ranks in the process group; the others are idle
        self.definitions = Definitions()
        self.after_restart = ""  # sentences that say what is left on the ranks after the last restart
        self.generation = 0  # how many process groups the ranks have formed
        super().__init__(world_size, backend, link, simulate, ranks_per_host, report)

    # -- the process group

    def _start_ranks(self) -> None:
        super()._start_ranks()
        self._join(self.members)

    def restart(self) -> None:
        """Replace every rank with a new process, in a new process group, and run the student's definitions again.

        Other variables are lost.
        """
        self.alive = False
        members, self.members = self.members, list(range(self.world_size))  # a definition may use its rank
        with interrupts.held():
            try:
                super().restart()
                self._define_again()
            finally:
                self.members = members
            if len(members) < self.world_size:
                self._join(members)

    def _define_again(self) -> None:
        """Run again on each rank what the student's cells had defined there, and describe what was restored."""
        from shared.ranks import rankside

        before, self.definitions = self.definitions, Definitions()
        deadline = time.monotonic() + _DEFINE_TIMEOUT_S
        pending = [
            line.apply_async(rankside.define, [cell.for_rank(rank) for cell in before.cells])
            for rank, line in enumerate(self._lines)
            if before.cells
        ]
        try:
            answers = [answer.get(timeout=max(0.0, deadline - time.monotonic())) for answer in pending]
            errors = {index: why for outcome in answers for index, why in outcome.value.items()}
        except Exception:  # a definition ended its process or did not finish, so none is run a second time
            ended = "a rank ended while these cells ran"
            why = ended if self._deaths() else f"these cells did not finish within {_DEFINE_TIMEOUT_S:g} s"
            super().restart()
            errors = dict.fromkeys(range(len(before.cells)), why)
        self.definitions.cells = [cell for index, cell in enumerate(before.cells) if index not in errors]
        failed = [(before.cells[index], why) for index, why in sorted(errors.items())]
        self.after_restart = describe_restart(self.definitions.cells, failed, list(before.computed))

    def close(self) -> None:
        """Stop every process of this set."""
        self.alive = False
        super().close()

    def regroup(self, members: list[int]) -> None:
        """Form a new process group of these ranks. All ranks must be alive to leave the old one.

        Raises:
            ValueError: If members are not ranks of this set.
            RanksError: If a rank has died.
        """
        if not members or not set(members) <= set(range(self.world_size)):
            raise ValueError(f"expected members among the ranks 0 to {self.world_size - 1}, got {members}")
        self.members = members  # a restart forms a group of these ranks
        self.check_whole()
        self.form_group(members)

    def form_group(self, members: list[int]) -> None:
        """Form a new process group of these ranks. If a rank cannot leave the old one, all ranks are restarted."""
        self.alive = False
        self.members = members
        with interrupts.held():
            try:
                self._join(members)
            except RanksError:  # gloo may wait forever for an operation on which nobody called wait()
                self._check_served()
                self.restart()

    def _join(self, members: list[int]) -> None:
        from shared.ranks import rankside

        self.generation += 1
        backend = self.placement.backend
        shares = self.placement.ranks_per_gpu > 1
        options = (self.generation, members, backend, self.detect_mismatch, self.placement.simulates, shares)
        timeout_s = NCCL_JOIN_TIMEOUT_S if "nccl" in backend else JOIN_TIMEOUT_S
        if shares:
            timeout_s = SHARED_JOIN_TIMEOUT_S
        self._on_all(lambda rank: (rankside.join, *options), timeout_s)
        self.alive = True

    # -- running

    def run(self, fn, args: Any = (), *, targets=None, timeout_s=DEFAULT_TIMEOUT_S, show=None, watch=None) -> list:
        """Run fn(*args), a function of `rankside`, on the target ranks. Returns their Outcomes in rank order.

        Args:
            args: The same for all ranks, or a function from a rank to its args.
            show: Called with the outcomes, before any error is raised, to print what the ranks printed.
            watch: Called now and then with the elapsed seconds and the ranks' positions.
        """
        self.check_whole()
        targets = list(self.members) if targets is None else targets
        args_of: Any = args if callable(args) else lambda rank: args
        began_at = {rank: self.log_bytes(rank) for rank in targets}
        with interrupts.held() as interrupted:
            pending = {rank: self._lines[rank].apply_async(fn, *args_of(rank)) for rank in targets}
            cell = self._wait(pending, CellState(targets, {}), timeout_s, watch, interrupted)
            if pending or cell.interrupted or any(o.error for o in cell.outcomes.values()):
                self._fail(cell, pending, timeout_s, show, began_at)
        if show:
            show(cell.outcomes, self.world_size)
        return [cell.outcomes[rank] for rank in targets]

    def _fail(self, cell: CellState, pending: dict, timeout_s: float, show, began_at: dict[int, int]) -> None:
        """Find the cause, stop what hangs, show what was printed, make the ranks usable again, and raise CellFailed."""
        hung = dict(pending)
        cell.positions = self._look()
        if cell.deaths:
            from shared.wire import sizes  # imports torch

            cell.transfers = {rank: sizes.read(self._sizes_path(rank)) for rank in range(self.world_size)}
        try:
            message = explain(cell)
        except Exception as error:  # the ranks must be recovered even if the diagnosis fails
            message = f"The cell failed, and the doctor could not find out why ({type(error).__name__}: {error})."
        outcomes = dict(cell.outcomes)
        if hung:
            if not cell.interrupted and not cell.deaths and self._seconds >= timeout_s:
                message += f"\n\nThe cell was stopped after {timeout_s:g} s."
                if self.placement.ranks_per_gpu > 1 and waits_for_nobody(cell):
                    message += _USED_UP
            self._end(pending, outcomes)
        if show:
            show(outcomes | self._left_by(set(began_at) - set(outcomes), began_at), self.world_size)
        starts = self.starts
        recovery = self._heal(cell, hung, pending)
        raise CellFailed(message, outcomes, cell, recovery, restarted=self.starts != starts)

    def _wait(self, pending: dict, cell: CellState, timeout_s: float, watch, interrupted) -> CellState:
        """Wait until every rank is done, or until it is certain that some never will be."""
        began = time.monotonic()
        next_look_s, previous, moved_s = 1.0, None, 0.0
        while pending and not cell.interrupted:
            next(iter(pending.values())).wait(0.02)
            self._collect(pending, cell.outcomes)
            self._check_served()
            self._seconds = time.monotonic() - began
            cell.interrupted = interrupted()
            cell.deaths = self._deaths()
            if cell.deaths or self._seconds > timeout_s:
                break
            failed = any(outcome.error for outcome in cell.outcomes.values())
            if self._seconds > next_look_s or (failed and previous is None and pending):
                next_look_s = self._seconds + 0.4
                cell.positions = self._look()
                if watch:
                    watch(self._seconds, cell.positions)
                current = json.dumps(cell.positions, sort_keys=True)
                if current != previous:
                    moved_s = self._seconds
                elif (
                    (is_deadlocked(cell) and self._seconds - moved_s > _STILL_S)
                    or (failed and self._all_wait(pending, cell))
                    or (self._seconds - moved_s > _DROPPED_S and waits_for_a_dropped_handle(cell))
                ):
                    break
                previous = current
        return cell

    def _left_by(self, ranks: set[int], began_at: dict[int, int]) -> dict:
        """Return Outcomes with what these ranks, which died or do not answer, wrote to their logs during the cell."""
        from shared.ranks import rankside

        return {rank: rankside.Outcome(rank, text=self.log_of(rank, began_at[rank])) for rank in ranks}

    @staticmethod
    def _all_wait(pending: dict, cell: CellState) -> bool:
        positions = [cell.positions.get(rank) for rank in pending]
        return all(position and position["waits"] != "no" for position in positions)

    def _collect(self, pending: dict, outcomes: dict) -> None:
        from shared.ranks import rankside

        for rank in [rank for rank, answer in pending.items() if answer.ready()]:
            try:
                outcome = pending.pop(rank).get()
                if not isinstance(outcome, rankside.Outcome):
                    raise TypeError(f"the rank answered with an object of type {type(outcome).__name__}")
                outcomes[rank] = outcome
            except Exception as error:  # the result could not be sent, or the process is gone
                described = {"kind": "Exception", "message": _message_of(error), "lines": [], "mismatch": False}
                described |= {"others_fault": False, "out_of_memory": False, "gpu_lost": False, "batch_open": False}
                outcomes[rank] = rankside.Outcome(rank, error=described, ended_s=time.time())

    # -- recovering

    def _look(self) -> dict:
        """Return the position of every rank in the process group."""
        return {rank: position for rank, position in self._ask("report").items() if rank in self.members}

    def _end(self, pending: dict, outcomes: dict) -> None:
        """Stop the cell on ranks that are still running: cut their connections, then interrupt Python."""
        self._ask("cut")
        for patience_s in (0.3, 0.7, 1.0):
            deadline = time.monotonic() + scaled(patience_s)
            while pending and time.monotonic() < deadline and not set(pending) <= set(self._deaths()):
                next(iter(pending.values())).wait(0.02)
                self._collect(pending, outcomes)
            for rank in pending:
                self._server.send_signal(self.pids[rank], signal.SIGINT)

    def _heal(self, cell: CellState, hung: dict, still_pending: dict) -> str:
        """Make sure that the next cell works. Returns sentences that say which variables are left."""
        errors = [outcome.error for outcome in cell.outcomes.values() if outcome.error]
        # After an error inside a batch, NCCL queues whatever the rank launches next, and never runs it.
        unusable = any(error["gpu_lost"] or error["batch_open"] for error in errors)
        if self._deaths() or still_pending or unusable:
            placement = self.placement
            self.restart()
            return self.after_restart + (f" {self.placement.valid}" if self.placement != placement else "")
        counts = {json.dumps(sorted(p["counts"])) for r, p in cell.positions.items() if p and r in self.members}
        if not hung and len(counts) <= 1 and not any(o.error and o.error["mismatch"] for o in cell.outcomes.values()):
            return _KEPT  # every rank has launched the same collectives: the group still works
        starts = self.starts
        self.form_group(self.members)
        return _NEW_GROUP if self.starts == starts else self.after_restart

    @property
    def whole(self) -> bool:
        """True while every rank is alive and can run a cell."""
        return self.alive and not self._deaths() and self._server.runs and self._exchange.works

    def _check_served(self) -> None:
        """Raise RanksError if the fork server has died."""
        if not self._server.runs:
            self.alive = False
            link = f', link="{self.link}"' if self.link else ""
            raise RanksError(
                f"The ranks cannot be reached. Start them again: ranks.start(world_size={self.world_size}{link}). "
                f"{self._server.last_words()}"
            )

    def check_whole(self) -> None:
        """Restart the ranks and raise RanksError if they cannot run a cell."""
        self._check_served()
        if self.whole:
            return
        reason = explain(CellState([], {}, deaths=self._deaths())) or "The ranks no longer formed one process group."
        self.restart()
        raise RanksError(f"{reason}\nThis happened between two cells. {self.after_restart}")


def _message_of(error: Exception) -> str:
    """Describe an error that was raised outside the student's code, while sending a call or its result."""
    message = str(error)
    if "pickle" in message:
        message += (
            "\n    A rank's result is pickled and sent to the notebook. Return numbers, tensors, or dicts of them."
        )
    return message
