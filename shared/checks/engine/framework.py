"""Exercises, and how their checks run a student's code on ranks and report the verdicts.

A check runs in the kernel. It draws fresh data and gives each rank only its own share. On the ranks, a *probe* calls
the student's class or function (the *piece*) and returns the results. The check compares them with what one process
computes from all the data. A rank never holds enough data to compute the answer alone, and the code that judges never
runs in the same process as the student's. This does not stop a student who attacks the process itself, so grading also
uses a sandbox, and measures from outside how many bytes the ranks send.
"""

import contextlib
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shared import mine, progress, ranks
from shared.checks.engine import assistance, candidate, display, parcel, scale
from shared.checks.engine.network_meter import Meter
from shared.checks.engine.prints import Prints
from shared.checks.engine.scale import DrawnSizes
from shared.checks.engine.verdicts import SAME_AS, Verdict
from shared.deadlines import scaled
from shared.ranks import rankside
from shared.ranks.diagnosis import (
    CellState,
    absent,
    dropped_handles,
    name_ranks,
    own_errors,
    receives_too_small,
    tags_differ,
)
from shared.ranks.errors import CellFailed, RanksError

PROBE_TIMEOUT_S = scaled(20.0)  # for one run of a probe, or for loading a file
MOST_HANGS = 2  # after that many hangs, the remaining checks are skipped
WORLD_SIZES = (1, 2, 3, 4)
_HINT_ON_WAITS = "Hint: do you call wait() on the handle of every isend and irecv?"
_HINT_ON_COLLECTIVES = "Hint: which ranks call this collective, and which never reach it?"
_HINT_ON_OTHER_WAYS = "Every value must travel in the collectives that the exercise asks for."
_HINT_ON_GROUPS = "Hint: this collective runs over all ranks. Which call in your code leaves out the group?"
_HINT_ON_GROUP_RANKS = (
    "Hint: does every call get `group`? And is each rank given by its index in the group, or by its global rank?"
)
_HINT_ON_WAITING = "Hint: which call would end this wait, and what keeps the other rank from reaching it?"
_HINT_ON_PARTNERS = "Hint: from which rank does each rank receive, and does that rank send to it?"
_HINT_ON_TAGS = (
    "Hint: from which rank does this line receive, and with which tag? Does that rank send to it with the same tag?"
)
_HINT_ON_SIZES = "Hint: what are the shape and dtype of the tensor that is sent to this rank?"
_HINT_ON_LOOPS = "Hint: is this line in a loop? If so, what would end the loop?"
_HINT_ON_ITSELF = "Hint: for which ranks should this line not run?"
_LEFT_IN_FLIGHT = "your code left a transfer in flight that nothing waits for, and the ranks had to be restarted"
NOT_WRITTEN = "it is not written yet"
RIGHT_AT_FIRST = "this check passed, but a longer training gave wrong results, so the exercise earns no points: see"
NOT_RUN = "this check"  # begins the reason why a check did not run
CALLED_ALONE = "called only by"  # in the context of a run in which only the ranks of a group call the piece
OUTSIDE_THE_GROUP = "but this rank's group is"  # in the error for a call that would leave the group
_IN_A_FILE = {  # how a file can define the names that a rank defines for %%ranks cells
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "rank": "rank = dist.get_rank()",
    "world_size": "world_size = dist.get_world_size()",
    "device": "device = tensor.device",
}
_POSITION = re.compile(r"^ .*\bline \d+: .*$", re.MULTILINE)  # in the evidence for an error that the piece raised
_UNWRITTEN = ("NotImplementedError: your code here", "NotImplementedError")
_NOT_DONE = (
    "the call returned, but the barrier after it did not complete: a transfer that it launched is still in flight, or "
    "its handle was discarded before it completed"
)


class Wrong(Exception):
    """The error that a failed check raises.

    Args:
        evidence: What was expected and what happened: one text, or one for each rank.
        hint: A hint that points at the mistake without giving the answer.
    """

    def __init__(self, evidence: str | dict[int, str], hint: str = ""):
        super().__init__(evidence)
        self.evidence = _merge(evidence) if isinstance(evidence, dict) else evidence
        self.hint = hint
        self.hangs = 0
        self.hints_at_error = False  # whether the hint is about the error that the piece raised


class CheckFailed(RanksError):
    """The error that ends a notebook's cell, after the verdicts are displayed, when a check has failed."""


class Unusable(RanksError):
    """The error for a file that cannot be imported or does not define the piece to check."""


@dataclass
class Attempt:
    """One run of a check, on `world_size` ranks."""

    piece: str
    path: str | None  # the candidate's file; None for the ranks' own namespace
    world_size: int
    random: random.Random
    fallback_name: str = ""
    scale: DrawnSizes = field(default_factory=DrawnSizes)
    meter: Meter | None = None  # measures from outside what the ranks send
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
        began_s = time.monotonic()
        results = self._run(probe, shared_args, own, context, targets)
        took_s = time.monotonic() - began_s
        if times := self.scale.times(took_s):
            timeout_s = PROBE_TIMEOUT_S + 2 * times * took_s
            results = self._run(probe, shared_args, own, context, targets, times, timeout_s)
        return results

    def _run(
        self,
        probe: Callable,
        shared_args: tuple,
        own: list[tuple],
        context: str,
        targets: list[int] | None,
        times: int = 1,
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> list:
        """Call a probe this many times on each rank. Returns what the last call returned, in rank order."""

        def request_of(rank: int) -> tuple:
            arguments = (*shared_args, *own[rank]) if rank < len(own) else shared_args
            names = self.piece, self.fallback_name
            return candidate.probe, (names, self.path, probe, arguments, self.scale.width, times), {}

        if self.meter:
            self.meter.begin()
        try:
            outcomes = ranks.current().run(
                rankside.call, request_of, targets=targets, timeout_s=timeout_s, show=self._note_prints
            )
        except CellFailed as failure:
            wrong = _from_failure(failure)
            if self.path is not None:
                wrong.evidence = wrong.evidence.replace("The cell was stopped", "The code was stopped")
                wrong.hint = wrong.hint or hint_on_names(wrong.evidence)
            if CALLED_ALONE in context:
                wrong.hint = _hint_in_a_group(wrong, failure)
            if context and wrong.evidence != NOT_WRITTEN:
                wrong.evidence = f"{context}: {wrong.evidence}"
            known = bool(dropped_handles(failure.cell))  # the other checks would only hang for the same reason
            if self.path is None and (failure.restarted or known):
                wrong.hangs = MOST_HANGS
            raise wrong from None
        packed, reports = zip(*(outcome.value for outcome in outcomes), strict=True)
        if self.meter and (what := self.meter.contradicts(reports, max(self.scale.longest, self.scale.repeats))):
            raise Wrong(what, _HINT_ON_OTHER_WAYS)
        return [parcel.unpack(value) for value in packed]

    def _note_prints(self, outcomes: dict, world_size: int) -> None:
        texts = {rank: outcome.text for rank, outcome in outcomes.items()}
        self.printed = texts if any(texts.values()) else self.printed


@dataclass
class Check:
    name: str
    judge: Callable[[Attempt], None]
    world_sizes: tuple[int, ...]
    simulates: tuple[int, ...] = ()  # the world sizes that it simulates on ranks of smaller worlds
    once: bool = False  # whether its probe cannot be repeated with the same arguments: it leaves files or store keys


@dataclass
class Exercise:
    """A class or function that the student writes, and the checks it must pass. Call it in a notebook to run them."""

    number: str
    piece: str
    fallback_name: str = ""  # the finished piece, which is checked if this step is not defined
    first: str = ""  # the name of a check; as long as it fails, the other checks would only confuse and do not run
    checks: list[Check] = field(default_factory=list)

    def check(
        self,
        name: str,
        world_sizes: tuple[int, ...] = WORLD_SIZES,
        simulates: tuple[int, ...] = (),
        once: bool = False,
    ):
        """Register judge(attempt) as a check of this exercise. It raises Wrong if the check fails."""

        def register(judge):
            self.checks.append(Check(name, judge, world_sizes, simulates, once))
            return judge

        return register

    def __call__(self) -> None:
        """Check what the student has defined on the ranks of this notebook, and display the verdicts.

        Raises:
            CheckFailed: If a check has failed.
        """
        starts = ranks.current().starts
        prints = Prints()
        verdicts = run_exercise(self, prints=prints)
        progress.record(self, verdicts)
        note = ranks.current().after_restart if ranks.current().starts != starts else ""
        missing = [verdict for verdict in verdicts if not verdict.passed]
        if not missing:
            headline = " · ".join([f"✓ Exercise {self.number} passed", *progress.points_and_next(self)])
            display.show(verdicts, headline, self._save_for_later_labs())
            prints.show()
            return
        failed = [verdict.check for verdict in missing if verdict.ran]
        first = f"begin with “{failed[0]}”" if failed else "some checks did not run"
        headline = f"✗ Exercise {self.number} has not passed yet: {first}"
        display.show(verdicts, headline, note, assistance.find(progress.name_of(self)))
        prints.show()
        skipped = [verdict.check for verdict in missing if not verdict.ran]
        counts = [_count(failed, "failed")] * bool(failed) + [_count(skipped, "did not run")] * bool(skipped)
        raise CheckFailed(f"Exercise {self.number}, {self.piece}: not there yet, {', '.join(counts)}.")

    def _save_for_later_labs(self) -> str:
        """Save the piece that has passed, if this is a lab. Returns a sentence if that is not possible, or ""."""
        module, _, name = progress.name_of(self).partition(".")
        if not name or not progress.in_a_lab():
            return ""
        try:
            mine.save(module, self.piece, ranks.current().definitions.cells)
        except (mine.NotSaved, OSError, SyntaxError) as error:
            return f"Later labs cannot import your {self.piece} from shared.mine: {error}."
        return ""


def run_exercise(
    exercise: Exercise,
    path: str | None = None,
    seed: int | None = None,
    only: str = "",
    prints: Prints | None = None,
    graded: bool = False,
    meter: Meter | None = None,
) -> list[Verdict]:
    """Run the checks of an exercise at every world size that they ask for and that there are ranks for.

    Args:
        exercise: The exercise.
        path: The student's file; None checks what is defined on the ranks.
        seed: Repeats the random choices of an earlier run.
        only: The name of the only check to run; "" runs all of them.
        prints: Collects what the student's code prints.
        graded: Whether to draw the sizes of models and the lengths of trainings, as in grading. If a check then fails
            only in a longer training or after many calls, all others fail with it.
        meter: Compares what the ranks say they send with what the network carries.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    checks = [check for check in exercise.checks if check.name == only or not only]
    if not checks:  # the check of that name belongs to another exercise for the same piece
        return []
    run = _Run(exercise, path, seed, graded, meter)
    found, tried = run.found, {check.name: [] for check in checks}
    hangs, starts = 0, ranks.current().starts

    def due(size: int) -> list[Check]:
        if exercise.first in found:
            return []
        return [check for check in checks if size in check.world_sizes and check.name not in found]

    sizes = [size for size in range(1, ranks.current().world_size + 1) if due(size)]
    with _one_thread(), ranks.world(min(sizes, default=1)):  # afterwards, all ranks are in one group again
        for size in sizes:
            if not due(size) or hangs >= MOST_HANGS:
                continue
            if size != min(sizes):
                ranks.current().regroup(list(range(size)))
            for check in due(size):
                if path is None and ranks.current().starts != starts:
                    break  # what the student's cells had computed on the ranks is gone
                if hangs >= MOST_HANGS or exercise.first in found:
                    break
                tried[check.name].append(size)
                attempt = run.judge(check, size)
                if prints is not None:
                    prints.add(check.name, size, attempt.printed, failed=attempt.wrong is not None)
                hangs += attempt.wrong.hangs if attempt.wrong else 0
        right_at_first = run.first_failure_in_a_longer_run(checks) if graded and hangs < MOST_HANGS else ""
    if path is None and ranks.current().starts != starts and not found:
        found[checks[0].name] = Wrong(_LEFT_IN_FLIGHT, _HINT_ON_WAITS)
    _report_once(found, checks)
    for check in checks if right_at_first else ():
        found.setdefault(check.name, Wrong(f"{RIGHT_AT_FIRST} “{right_at_first}”"))
    for name, sizes_drawn in run.drawn.items():
        found[name].evidence += sizes_drawn
    return [
        _not_run(exercise, check, f"runs when “{exercise.first}” passes")
        if exercise.first in found and check.name != exercise.first and not right_at_first
        else _verdict(exercise, check, tried[check.name], found.get(check.name))
        for check in checks
    ]


@dataclass
class _Run:
    """One run of the checks of an exercise. It collects what they find wrong."""

    exercise: Exercise
    path: str | None
    seed: int
    graded: bool
    meter: Meter | None
    found: dict[str, Wrong] = field(default_factory=dict)  # by the name of the check
    drawn: dict[str, str] = field(default_factory=dict)  # the sizes with which a check failed in grading
    attempts: list[tuple[Check, Attempt]] = field(default_factory=list)

    def judge(self, check: Check, size: int) -> Attempt:
        """Run a check on `size` ranks, and note what it finds wrong."""
        attempt = self._attempt(check, size, scale.SHORT)
        self.attempts.append((check, attempt))
        self._note(check, attempt)
        return attempt

    def _note(self, check: Check, attempt: Attempt) -> None:
        if attempt.wrong is not None:
            self.found[check.name] = attempt.wrong
            sizes = f": {attempt.scale}" if str(attempt.scale) else ""
            if self.graded and attempt.wrong.evidence != NOT_WRITTEN:
                self.drawn[check.name] = f"\n(Drawn with seed {self.seed}{sizes}.)"

    def _attempt(self, check: Check, size: int, added: range) -> Attempt:
        draw = random.Random(f"{self.seed} {check.name} {size}" + " long" * (added == scale.LONG))
        sizes = DrawnSizes.drawn(draw, size, added) if self.graded else DrawnSizes()
        attempt = Attempt(self.exercise.piece, self.path, size, draw, self.exercise.fallback_name, sizes, self.meter)
        attempt.wrong = _judge(check, attempt)
        return attempt

    def first_failure_in_a_longer_run(self, checks: list[Check]) -> str:
        """Look for code that is right at first and wrong later. Returns the name of a check that shows this, or "".

        A result counts only if it occurs twice. Code that is wrong at random, for example because of a race, therefore
        loses only the checks that it fails, and a machine that is slow for a moment costs nothing.
        """
        for check, attempt in self.attempts:
            if attempt.scale.longest and attempt.wrong and not attempt.wrong.hangs:
                size = attempt.world_size
                ranks.current().regroup(list(range(size)))
                as_usual = [self._attempt(check, size, scale.NONE).wrong is None for _ in range(2)]
                return check.name if all(as_usual) and self._attempt(check, size, scale.SHORT).wrong else ""
        for check, size in self._draw_long(checks):
            ranks.current().regroup(list(range(size)))
            attempt = self._attempt(check, size, scale.LONG)
            if attempt.wrong and self._attempt(check, size, scale.LONG).wrong:
                self._note(check, attempt)
                return check.name
        return ""

    def _draw_long(self, checks: list[Check]) -> list[tuple[Check, int]]:
        """Draw which checks run for longer, and on how many ranks: on more than one rank, if possible."""
        draw = random.Random(f"{self.seed} long")
        trained = [(check, attempt.world_size) for check, attempt in self.attempts if attempt.scale.longest]
        if trained:
            return [draw.choice([each for each in trained if each[1] > 1] or trained)]
        sizes = {check.name: [a.world_size for each, a in self.attempts if each is check] for check in checks}
        passed = [each for each in checks if sizes[each.name] and each.name not in self.found and not each.once]
        several = [passed[0], draw.choice(passed)] if passed else []
        return [(check, draw.choice([s for s in sizes[check.name] if s > 1] or sizes[check.name])) for check in several]


def _report_once(found: dict[str, Wrong], checks: list[Check]) -> None:
    """Refer to an earlier check instead of repeating its evidence and its hint.

    A hint on the group is about one mistake, although the evidence depends on which rank fails first. So is a hint on
    an error that the same line of the piece raises, although the evidence depends on the model.
    """
    reported = {}
    for name in (check.name for check in checks if check.name in found):
        wrong = found[name]
        in_a_group = wrong.hint in (_HINT_ON_GROUPS, _HINT_ON_GROUP_RANKS)
        where = tuple(_POSITION.findall(wrong.evidence)) if wrong.hints_at_error else ()
        earlier = reported.setdefault(wrong.hint if in_a_group else (where or wrong.evidence, wrong.hint), name)
        if earlier != name and wrong.evidence != NOT_WRITTEN:
            wrong.evidence, wrong.hint = f"{SAME_AS} “{earlier}”", ""


def _count(names: list[str], what: str) -> str:
    return f"{len(names)} check{'s' if len(names) > 1 else ''} {what} ({', '.join(names)})"


@contextlib.contextmanager
def _one_thread():
    """Use one thread in the kernel: the ranks occupy the cores, and a second thread would spin while it waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _judge(check: Check, attempt: Attempt) -> Wrong | None:
    try:
        with scale.models_of(attempt.scale):
            check.judge(attempt)
    except Wrong as wrong:
        return wrong
    except RanksError:
        raise
    except Exception as error:  # the piece may return or store anything, such as None instead of a tensor
        return Wrong(f"your code returned something that cannot be compared: {type(error).__name__}: {error}")
    return None


def _verdict(exercise: Exercise, check: Check, tried: list[int], wrong: Wrong | None) -> Verdict:
    if not tried:
        least = min(check.world_sizes)
        too_few = least > ranks.current().world_size
        why = f"needs {least} ranks" if too_few else "did not run, because earlier checks failed"
        return _not_run(exercise, check, why)
    if wrong is None:
        return Verdict(exercise.piece, check.name, True, check.simulates or tuple(tried))
    return Verdict(exercise.piece, check.name, False, check.simulates or (tried[-1],), wrong.evidence, wrong.hint)


def _not_run(exercise: Exercise, check: Check, why: str) -> Verdict:
    return Verdict(exercise.piece, check.name, False, (), f"{NOT_RUN} {why}")


def hint_on_names(evidence: str) -> str:
    """Return a hint if a file uses a name that only %%ranks cells have, or ""."""
    for name, code in _IN_A_FILE.items():
        if f"NameError: name '{name}' is not defined" in evidence:
            return f"Only %%ranks cells have `{name}`. In a file, define it yourself, for example: `{code}`."
    return ""


def _from_failure(failure: CellFailed) -> Wrong:
    """Describe how a piece raised, hung or killed its rank, in the doctor's words."""
    errors = [outcome.error for outcome in failure.outcomes.values() if outcome.error]
    # Only the first line counts, as notes may follow it. Torch raises NotImplementedError with other messages.
    if any(error["message"].split("\n")[0] in _UNWRITTEN for error in errors):
        return Wrong(NOT_WRITTEN, "Replace the line `raise NotImplementedError(…)` and run its cell again.")
    missing = next((error for error in errors if error["kind"] == "PieceMissing"), None)
    if missing:
        raise Unusable(missing["message"].split(": ", 1)[1])
    wrong = Wrong(failure.explanation.strip(), _hint_on(failure))
    raised = own_errors(failure.cell)
    if (handles := dropped_handles(failure.cell)) and not raised:
        wrong = Wrong("\n".join(handles), _HINT_ON_WAITS)
    elif _waits_behind_the_call(failure):
        wrong = Wrong(_NOT_DONE, _HINT_ON_WAITS)
    outside = [rank for rank, position in failure.cell.positions.items() if _in_our_barrier(position)]
    if outside and not raised and wrong.evidence != _NOT_DONE:
        verb = "is" if len(outside) == 1 else "are"
        wrong.evidence += f"\n{name_ranks(outside).capitalize()} {verb} not in your code: that barrier is the check's."
    wrong.hangs = 1 if len(failure.cell.outcomes) < len(failure.cell.targets) else 0
    return wrong


def _waits_behind_the_call(failure: CellFailed) -> bool:
    """Return whether the ranks have left the student's code and hang in the barrier that the check runs after it.

    If a rank has raised an error, the others wait there only for this rank.
    """
    if own_errors(failure.cell):
        return False
    found = [position for position in failure.cell.positions.values() if position and position["busy"]]
    return bool(found) and all(map(_in_our_barrier, found))


def _in_our_barrier(position: dict | None) -> bool:
    """Return whether a rank is outside the student's code, in a barrier of the check."""
    called = position["call"] if position and position["busy"] and not position["line"] else None
    return bool(called) and called["op"] == "barrier"


def _hint_on(failure: CellFailed) -> str:
    """Hint at collectives only if a rank is waiting in one and no rank has raised an error of its own."""
    if any(receives_too_small(failure.cell, rank) for rank in failure.cell.deaths):
        return _HINT_ON_SIZES
    errors = [outcome.error for outcome in failure.cell.outcomes.values() if outcome.error]
    if any(is_a_transfer_to_itself(error["message"]) for error in errors):
        return _HINT_ON_ITSELF
    if errors:
        return ""
    found = [position for position in failure.cell.positions.values() if position]
    waiting = [each["call"] for each in found if each["busy"] and each["waits"] != "no" and not _in_our_barrier(each)]
    if not waiting and not failure.cell.deaths and any(_runs_own_code(position) for position in found):
        return _HINT_ON_LOOPS
    in_collectives = waiting and all(call and call["partner"] is None for call in waiting)
    uses_transfers = any(len(lane) > 1 for position in found for lane, _ in position["counts"])  # between two ranks
    if uses_transfers and not in_collectives:
        return _hint_on_transfers(failure.cell, [position for position in found if position["busy"]])
    waits = any(position["busy"] and position["waits"] != "no" for position in found)
    return _HINT_ON_COLLECTIVES if waits else ""


def _runs_own_code(position: dict) -> bool:
    return position["busy"] and position["waits"] == "no" and bool(position["line"])


def _ignores_the_group(failure: CellFailed) -> bool:
    """Return whether a rank waits in a collective over all ranks of its world."""
    calls = [p["call"] for p in failure.cell.positions.values() if p and p["busy"] and p["waits"] != "no"]
    return any(call and call["partner"] is None and call["group"] == failure.cell.targets for call in calls)


def _hint_in_a_group(wrong: Wrong, failure: CellFailed) -> str:
    """Hint at the group if only its ranks called the piece, and one of them tried to communicate with other ranks."""
    among_all = OUTSIDE_THE_GROUP in wrong.evidence and " among ranks " in wrong.evidence
    if among_all or (wrong.hint == _HINT_ON_COLLECTIVES and _ignores_the_group(failure)):
        return _HINT_ON_GROUPS
    outside = OUTSIDE_THE_GROUP in wrong.evidence or "is not part of group" in wrong.evidence
    stuck = wrong.hint.startswith((_HINT_ON_ITSELF, _HINT_ON_WAITING, _HINT_ON_PARTNERS))
    return _HINT_ON_GROUP_RANKS if outside or stuck else wrong.hint


def is_a_transfer_to_itself(text: str) -> bool:
    """Return whether an error says that a rank sends to itself or receives from itself."""
    return "Invalid destination rank" in text or "Invalid source rank" in text


def _hint_on_transfers(cell: CellState, running: list[dict]) -> str:
    """Hint at tags, at a rank that has returned without its side of a transfer, or else at partners or at the order.

    If each rank has launched as many sends as receives, their order does not matter.
    """
    if any(position["waits"] != "no" and tags_differ(position, cell) for position in running):
        return _HINT_ON_TAGS
    for position in running:
        missing = absent(position, cell)
        returned = [rank for rank in missing if rank in cell.outcomes or _in_our_barrier(cell.positions.get(rank))]
        if position["call"] and position["call"]["partner"] is not None and returned:
            here, there = ("send", "receive") if position["call"]["op"] == "send" else ("receive", "send")
            return (
                f"Hint: which line of your function should make rank {returned[0]} {there}? "
                f"Or should rank {position['rank']} not {here}?"
            )
    if running and all(_launched(position, "send") == _launched(position, "recv") for position in running):
        return _HINT_ON_PARTNERS
    handles = any(".wait(" in (position["line"] or "") for position in running)
    return _HINT_ON_WAITING + (" And do you call wait() on the handle of each transfer?" if handles else "")


def _launched(position: dict, op: str) -> int:
    return sum(count for lane, count in position["counts"] if len(lane) > 1 and lane[1] == op)


def _merge(by_rank: dict[int, str]) -> str:
    """Merge equal evidence from several ranks into one line."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(by_rank.items()):
        groups.setdefault(text, []).append(rank)
    return "\n".join(f"{name_ranks(members)} │ {text}" for text, members in groups.items())
