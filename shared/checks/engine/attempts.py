"""One attempt at a check: the student's code is called on ranks, and the check judges what it returns.

A `Runner` makes the attempts. It is the seam for programs that judge the code of others: they can derive a runner that
draws sizes, calls probes several times, measures what the ranks send, and tries again what has passed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shared import ranks
from shared.checks.engine import candidate, parcel
from shared.checks.engine.candidate import Report
from shared.checks.engine.failures import NOT_WRITTEN, Wrong, from_failure, hint_in_a_group, hint_on_names
from shared.checks.engine.sizes import Sizes, models_of
from shared.deadlines import scaled
from shared.ranks import rankside
from shared.ranks.diagnosis import dropped_handles
from shared.ranks.errors import CellFailed, RanksError

PROBE_TIMEOUT_S = scaled(20.0)  # for one run of a probe, or for loading a file
MOST_HANGS = 2  # after that many hangs, the remaining checks are skipped
CALLED_ALONE = "called only by"  # in the context of a run in which only the ranks of a group call the piece


@dataclass
class Attempt:
    """One run of a check, on `world_size` ranks."""

    piece: str
    path: str | None  # the candidate's file; None for the ranks' own namespace
    world_size: int
    random: random.Random
    fallback_name: str = ""
    sizes: Sizes = field(default_factory=Sizes)
    runner: "Runner" = field(default_factory=lambda: Runner())
    printed: dict[int, str] = field(default_factory=dict)  # by rank, in the last run in which any rank printed
    wrong: Wrong | None = None  # what the check has found wrong

    def draw_seed(self) -> int:
        return self.random.randrange(2**31)

    def run(
        self,
        probe: Callable,
        *shared_args,
        per_rank: list[tuple] | None = None,
        context: str = "",
        targets: list[int] | None = None,
    ) -> list:
        """Call probe(piece, *shared_args, *per_rank[rank]) on each rank of this world.

        Args:
            probe: The function that calls the student's piece on a rank.
            shared_args: Arguments that are the same on all ranks.
            per_rank: Further arguments, by rank.
            context: What is being tried. It comes before the evidence if something goes wrong.
            targets: Other ranks to run the probe on, such as one that is in no process group.

        Returns:
            What the probe returned, in rank order.

        Raises:
            Wrong: If the piece raises, hangs or kills its rank.
        """
        own = per_rank or [()] * self.world_size

        def call(times: int = 1, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[list, list[Report]]:
            def request_of(rank: int) -> tuple:
                arguments = (*shared_args, *own[rank]) if rank < len(own) else shared_args
                names = self.piece, self.fallback_name
                return candidate.probe, (names, self.path, probe, arguments, self.sizes.width, times), {}

            return self._call(request_of, context, targets, timeout_s)

        return self.runner.probe(self, call)

    def _call(
        self, request_of: Callable[[int], tuple], context: str, targets: list[int] | None, timeout_s: float
    ) -> tuple[list, list[Report]]:
        """Call a probe on each rank. Returns what it returned, and what each rank reports."""
        try:
            outcomes = ranks.current().run(
                rankside.call, request_of, targets=targets, timeout_s=timeout_s, show=self._note_prints
            )
        except CellFailed as failure:
            wrong = from_failure(failure)
            if self.path is not None:
                wrong.evidence = wrong.evidence.replace("The cell was stopped", "The code was stopped")
                wrong.hint = wrong.hint or hint_on_names(wrong.evidence)
            if CALLED_ALONE in context:
                wrong.hint = hint_in_a_group(wrong, failure)
            if context and wrong.evidence != NOT_WRITTEN:
                wrong.evidence = f"{context}: {wrong.evidence}"
            known = bool(dropped_handles(failure.cell))  # the other checks would only hang for the same reason
            if self.path is None and (failure.restarted or known or _is_endless(failure)):
                wrong.hangs = MOST_HANGS
            raise wrong from None
        packed, reports = zip(*(outcome.value for outcome in outcomes), strict=True)
        return [parcel.unpack(value) for value in packed], list(reports)

    def _note_prints(self, outcomes: dict, world_size: int) -> None:
        texts = {rank: outcome.text for rank, outcome in outcomes.items()}
        self.printed = texts if any(texts.values()) else self.printed


def _is_endless(failure: CellFailed) -> bool:
    """Return whether somebody has stopped the code, or a rank was computing until its time was over."""
    pending = [position for rank, position in failure.cell.positions.items() if rank not in failure.cell.outcomes]
    return failure.cell.interrupted or any(position and not position["busy"] for position in pending)


@dataclass
class Check:
    name: str
    judge: Callable[[Attempt], None]
    world_sizes: tuple[int, ...]
    simulates: tuple[int, ...] = ()  # the world sizes that it simulates on ranks of smaller worlds
    once: bool = False  # whether its probe cannot be repeated with the same arguments: it leaves files or store keys


@dataclass
class Run:
    """One run of the checks of an exercise. It collects what they find wrong."""

    piece: str
    fallback_name: str
    path: str | None
    seed: int
    runner: "Runner"
    found: dict[str, Wrong] = field(default_factory=dict)  # by the name of the check
    descriptions: dict[str, str] = field(default_factory=dict)  # what the runner says about a failed check
    attempts: list[tuple[Check, Attempt]] = field(default_factory=list)

    def judge(self, check: Check, size: int) -> Attempt:
        """Run a check on `size` ranks, and note what it finds wrong."""
        attempt = self.attempt(check, size)
        self.attempts.append((check, attempt))
        self.note(check, attempt)
        return attempt

    def note(self, check: Check, attempt: Attempt) -> None:
        if attempt.wrong is not None:
            self.found[check.name] = attempt.wrong
            if description := self.runner.describe(self, attempt):
                self.descriptions[check.name] = description

    def attempt(self, check: Check, size: int, variation: str = "") -> Attempt:
        """Run a check on `size` ranks. Another variation draws other data."""
        draw = random.Random(f"{self.seed} {check.name} {size}{variation}")
        sizes = self.runner.sizes(draw, size)
        attempt = Attempt(self.piece, self.path, size, draw, self.fallback_name, sizes, self.runner)
        attempt.wrong = _judge(check, attempt)
        return attempt


def _judge(check: Check, attempt: Attempt) -> Wrong | None:
    try:
        with models_of(attempt.sizes):
            check.judge(attempt)
    except Wrong as wrong:
        return wrong
    except RanksError:
        raise
    except Exception as error:  # the piece may return or store anything, such as None instead of a tensor
        return Wrong(f"your code returned something that cannot be compared: {type(error).__name__}: {error}")
    return None


class Runner:
    """Makes each attempt once, with the usual sizes."""

    def sizes(self, draw: random.Random, world_size: int) -> Sizes:
        """Return the sizes of an attempt."""
        return Sizes()

    def probe(self, attempt: Attempt, call: Callable[..., tuple[list, list[Report]]]) -> list:
        """Call a probe on the ranks. Returns the result of each.

        Args:
            attempt: The attempt to which the call belongs.
            call: call(times=1, timeout_s=…) calls the probe this many times on each rank. It returns the last result
                of each rank, and what each rank reports.

        Raises:
            Wrong: If the student's code is wrong.
        """
        results, _ = call()
        return results

    def describe(self, run: Run, attempt: Attempt) -> str:
        """Return what to add to the evidence of an attempt that has failed."""
        return ""

    def try_again(self, run: Run, checks: list[Check]) -> str:
        """Try again what has passed. Returns the name of a check that fails only now, or ""."""
        return ""


def on_each(judge: Callable, *cases) -> Callable[[Attempt], None]:
    """Return the judge of a check that judges some cases, one after the other."""

    def judge_all(attempt: Attempt) -> None:
        for case in cases:
            judge(attempt, case)

    return judge_all
