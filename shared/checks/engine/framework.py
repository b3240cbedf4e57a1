"""Checks that are hard to fool: what an exercise is, how it is tried on ranks, how a verdict is said.

A check runs in the kernel. It draws fresh data, hands each rank only its own share, lets a *probe* use
the student's piece there, and judges what comes back against one process that had all the data. A rank
never holds what it would need to make up the answer, and the code that judges never runs beside the
student's. (A student who attacks the process itself is another matter: grading needs a sandbox.)
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shared import progress, ranks
from shared.checks.engine import candidate, display, parcel
from shared.checks.engine.verdicts import Verdict
from shared.deadlines import scaled
from shared.ranks import rankside
from shared.ranks.diagnosis import name_ranks
from shared.ranks.errors import CellFailed, RanksError

CHECK_TIMEOUT_S = scaled(20.0)
MOST_HANGS = 2  # a piece that hangs again and again need not be tried any further
WORLD_SIZES = (1, 2, 3, 4)
_LEFT_UNDER_WAY = "it left a message under way that nobody waits for, and the ranks had to be started again"
_WAIT_AND_REDEFINE = (
    "Hint: does every isend and irecv meet its wait()? Then run the cells that define your functions again."
)
RUN_AGAIN = "Then run every cell that defines something again."
NOT_WRITTEN = "it is not written yet"
_UNWRITTEN = ("NotImplementedError: your code here", "NotImplementedError")
_NOT_DONE = (
    "the call came back, but then the ranks could not meet: a message that it launched is still under way, or was "
    "dropped together with its work"
)


class Wrong(Exception):
    """What a check raises: the evidence (one text, or one per rank) and a hint that leads but does not solve."""

    def __init__(self, evidence: str | dict[int, str], hint: str = ""):
        super().__init__(evidence)
        self.evidence = _merge(evidence) if isinstance(evidence, dict) else evidence
        self.hint = hint
        self.hangs = 0


class CheckFailed(RanksError):
    """Raised in the notebook, after the verdicts are shown, when a check of an exercise failed."""


class Unusable(RanksError):
    """There is nothing to check: no such piece, or a file that does not load."""


@dataclass
class Attempt:
    """One try of the student's piece by one check, in a world of world_size ranks."""

    piece: str
    path: str | None  # the candidate's file; None for the ranks' own namespace
    world_size: int
    random: random.Random
    stands_in: str = ""

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
        """Call probe(piece, *shared_args, *per_rank[rank]) on each rank of this world. → results in rank order

        context: what is being tried, said before the evidence if it goes wrong.
        targets: other ranks to run it on, such as one that stands by.
        Raises: Wrong when the piece raises, hangs or kills its rank.
        """
        own = per_rank or [()] * self.world_size

        def request_of(rank: int) -> tuple:
            arguments = (*shared_args, *own[rank]) if rank < len(own) else shared_args
            return candidate.probe, ((self.piece, self.stands_in), self.path, probe, arguments), {}

        try:
            outcomes = ranks.current().run(rankside.call, request_of, targets=targets, timeout_s=CHECK_TIMEOUT_S)
        except CellFailed as failure:
            wrong = _from_failure(failure)
            if context and wrong.evidence != NOT_WRITTEN:
                wrong.evidence = f"{context}: {wrong.evidence}"
            if failure.restarted and self.path is None:
                wrong.evidence += "\nThe ranks were started again, and what you defined on them is gone."
                wrong.hint = f"{wrong.hint} {RUN_AGAIN}".strip()
                wrong.hangs = MOST_HANGS
            raise wrong from None
        return [parcel.unpack(outcome.value) for outcome in outcomes]


@dataclass
class Check:
    name: str
    judge: Callable[[Attempt], None]
    world_sizes: tuple[int, ...]


@dataclass
class Exercise:
    """A piece that the student writes, and the checks it must pass. Call it in a notebook to run them."""

    number: str
    piece: str
    optional: bool = False  # a step towards another piece: a file may leave it out
    stands_in: str = ""  # the finished piece, which is tried where there is no such step
    checks: list[Check] = field(default_factory=list)

    def check(self, name: str, world_sizes: tuple[int, ...] = WORLD_SIZES):
        """Register judge(attempt) as a check of this exercise; it raises Wrong, or returns."""

        def register(judge):
            self.checks.append(Check(name, judge, world_sizes))
            return judge

        return register

    def __call__(self) -> None:
        """Check the piece that the ranks of this notebook hold.

        Raises: CheckFailed after showing every verdict.
        """
        verdicts = run_exercise(self)
        display.show(verdicts)
        progress.record(self, verdicts)
        failed = [verdict.check for verdict in verdicts if not verdict.passed]
        if failed:
            raise CheckFailed(f"Exercise {self.number}, {self.piece}: not there yet ({', '.join(failed)}).")


def run_exercise(exercise: Exercise, path: str | None = None, seed: int | None = None, only: str = "") -> list[Verdict]:
    """Try one exercise's checks in every world size that they ask for and that the ranks allow.

    only: the name of the one check to try.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    checks = [check for check in exercise.checks if check.name == only or not only]
    if not checks:  # another exercise checks the same piece by that name
        return []
    found: dict[str, Wrong] = {}
    tried: dict[str, list[int]] = {check.name: [] for check in checks}
    hangs, starts = 0, ranks.current().starts

    def due(size: int) -> list[Check]:
        return [check for check in checks if size in check.world_sizes and check.name not in found]

    sizes = [size for size in range(1, ranks.current().world_size + 1) if due(size)]
    with _one_thread(), ranks.world(min(sizes, default=1)):  # which leaves all ranks in one group again
        for size in sizes:
            if not due(size) or hangs >= MOST_HANGS:
                continue
            if size != min(sizes):
                ranks.current().regroup(list(range(size)))
            for check in due(size):
                if path is None and ranks.current().starts != starts:
                    break  # what the student defined on the ranks is gone
                if hangs >= MOST_HANGS:
                    break
                tried[check.name].append(size)
                draw = random.Random(f"{seed} {check.name} {size}")
                attempt = Attempt(exercise.piece, path, size, draw, exercise.stands_in)
                wrong = _judge(check, attempt)
                if wrong is not None:
                    found[check.name] = wrong
                    hangs += wrong.hangs
    if path is None and ranks.current().starts != starts and not found:
        found[checks[0].name] = Wrong(_LEFT_UNDER_WAY, _WAIT_AND_REDEFINE)
    return [_verdict(exercise, check, tried[check.name], found.get(check.name)) for check in checks]


@contextlib.contextmanager
def _one_thread():
    """Let the kernel judge on one thread: the ranks have the cores, and a second thread would spin for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _judge(check: Check, attempt: Attempt) -> Wrong | None:
    try:
        check.judge(attempt)
    except Wrong as wrong:
        return wrong
    except RanksError:
        raise
    except Exception as error:  # a piece may leave anything behind, None where a tensor should be
        return Wrong(f"the piece left something that cannot be compared: {type(error).__name__}: {error}")
    return None


def _verdict(exercise: Exercise, check: Check, tried: list[int], wrong: Wrong | None) -> Verdict:
    if not tried:
        return Verdict(exercise.piece, check.name, False, (), "not tried any more")
    if wrong is None:
        return Verdict(exercise.piece, check.name, True, tuple(tried))
    return Verdict(exercise.piece, check.name, False, (tried[-1],), wrong.evidence, wrong.hint)


def _from_failure(failure: CellFailed) -> Wrong:
    """Say what a piece that raised, hung or died did, in the doctor's words."""
    errors = [outcome.error for outcome in failure.outcomes.values() if outcome.error]
    # The first line: notes may follow. Torch raises the like, with words of its own.
    if any(error["message"].split("\n")[0] in _UNWRITTEN for error in errors):
        return Wrong(NOT_WRITTEN, "Replace the line `raise NotImplementedError(…)` and run its cell again.")
    missing = next((error for error in errors if error["kind"] == "PieceMissing"), None)
    if missing:
        raise Unusable(missing["message"].split(": ", 1)[1])
    wrong = Wrong(failure.explanation.strip(), _hint_on(failure))
    if _waits_behind_the_call(failure):
        wrong = Wrong(_NOT_DONE, "Hint: does every isend and irecv meet its wait()?")
    wrong.hangs = 1 if len(failure.case.outcomes) < len(failure.case.targets) else 0
    return wrong


def _waits_behind_the_call(failure: CellFailed) -> bool:
    """The ranks are past the student's lines, and hang in the barrier with which a check lets them meet again."""
    found = [position for position in failure.case.positions.values() if position and position["busy"]]
    return bool(found) and all(p["call"] and p["call"]["op"] == "barrier" and not p["line"] for p in found)


def _hint_on(failure: CellFailed) -> str:
    """Point at the collective only where somebody waits in one, and nobody failed for a reason of their own."""
    if any(outcome.error for outcome in failure.case.outcomes.values()):
        return ""
    found = [position for position in failure.case.positions.values() if position]
    if any(len(lane) > 1 for position in found for lane, _ in position["counts"]):  # messages between two ranks
        return "Hint: who could begin? And does every isend and irecv meet its wait()?"
    waits = any(position["busy"] and position["waits"] != "no" for position in found)
    return "Hint: which ranks call this collective, and which never come to it?" if waits else ""


def _merge(by_rank: dict[int, str]) -> str:
    """Put equal evidence of several ranks in one line."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(by_rank.items()):
        groups.setdefault(text, []).append(rank)
    return "\n".join(f"{name_ranks(members)} │ {text}" for text, members in groups.items())
