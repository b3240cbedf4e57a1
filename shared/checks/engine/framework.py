"""Exercises, and how their checks run a student's code on ranks and report the verdicts.

A check runs in the kernel. It draws fresh data and gives each rank only its own share. On the ranks, a *probe* calls
the student's class or function (the *piece*) and returns the results. The check compares them with what one process
computes from all the data. A rank never holds enough data to compute the answer alone, and the code that judges never
runs in the same process as the student's.
"""

import contextlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shared import mine, progress, ranks
from shared.checks.engine import cells, display
from shared.checks.engine.attempts import (
    MOST_HANGS,
    Check,
    Run,
    Runner,
)
from shared.checks.engine.failures import (
    HINT_ON_GROUP_RANKS,
    HINT_ON_GROUPS,
    HINT_ON_STUBS,
    HINT_ON_WAITS,
    NOT_WRITTEN,
    Wrong,
)
from shared.checks.engine.verdicts import SAME_AS, Verdict
from shared.ranks import magic, reader
from shared.ranks.errors import RanksError

# -- what the student's code prints while a check runs it, in a few lines


MOST_LINES = 12  # per rank


@dataclass
class Prints:
    """Keeps the prints of one run: of the first check that fails, or else of the first that prints anything."""

    check: str = ""
    world_size: int = 0
    texts: dict[int, str] | None = None
    failed: bool = False

    def add(self, check: str, world_size: int, texts: dict[int, str], failed: bool) -> None:
        """Offer what the ranks printed in the last run of a check's probe that printed anything."""
        if texts and (self.texts is None or (failed and not self.failed)):
            self.check, self.world_size, self.texts, self.failed = check, world_size, texts, failed

    def show(self) -> None:
        """Print the first lines of each rank, merged where ranks agree."""
        if self.texts is None:
            return
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        print(f"Your code printed this in the check “{self.check}”, on {ranks}:")
        for line in magic.labelled({rank: _first_lines(text) for rank, text in self.texts.items()}):
            print(line)


def _first_lines(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    more = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], f"… {more} more lines not shown"] if more > 1 else lines)


WORLD_SIZES = (1, 2, 3, 4)
_LEFT_IN_FLIGHT = "your code left a transfer in flight that nothing waits for, and the ranks had to be restarted"
RIGHT_AT_FIRST = "this check passed, but a longer training gave wrong results, so the exercise earns no points: see"
NOT_RUN = "this check"  # begins the reason why a check did not run
MOST_EVIDENCE = 500  # characters in the message of an error
FAILURES_BEFORE_OURS = 3
_POSITION = re.compile(r"^ .*\bline \d+: .*$", re.MULTILINE)  # in the evidence for an error that the piece raised


cells.listen()


class CheckFailed(RanksError):
    """The error that ends a notebook's cell, after the verdicts are displayed, when a check has failed."""


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

    def table(self, *rows: tuple[str, tuple[int, ...], Callable]) -> None:
        """Register checks. Each row has a check's name, its world sizes and its judge."""
        for name, world_sizes, judge in rows:
            self.check(name, world_sizes)(judge)

    def __call__(self) -> None:
        """Check what the student has defined on the ranks of this notebook, and display the verdicts.

        Raises:
            CheckFailed: If a check has failed.
        """
        if reason := cells.nothing_new(self.piece):
            raise CheckFailed(f"{reason} Then run this check again.")
        starts = ranks.current().starts
        prints = Prints()
        with display.live() as report:
            verdicts = run_exercise(self, prints=prints, report=report)
        if not_written(verdicts):
            # Somebody who runs all cells of a lab has not tried this exercise, so one line is enough.
            display.show([], f"– Exercise {self.number}: {NOT_WRITTEN}. {HINT_ON_STUBS}")
            raise CheckFailed(f"Exercise {self.number}, {self.piece}: not written yet.")
        progress.record(self, verdicts)
        notes = [cells.judged(self.piece) if reader.present() else ""]
        notes += [ranks.current().after_restart] if ranks.current().starts != starts else []
        note = " ".join(filter(None, notes))
        missing = [verdict for verdict in verdicts if not verdict.passed]
        if not missing:
            note = " ".join(filter(None, [note, self._save_for_later_labs()]))
            found = cells.help_for(progress.name_of(self))
            display.show_success(verdicts, f"✓ Exercise {self.number} passed", note, progress.after(self), found.ours)
            prints.show()
            return
        failed = [verdict.check for verdict in missing if verdict.ran]
        first = f"begin with “{failed[0]}”" if failed else "some checks did not run"
        headline = f"✗ Exercise {self.number} has not passed yet: {first}"
        found = cells.help_for(progress.name_of(self))
        if found.ours and progress.failures_in_a_row(self) >= FAILURES_BEFORE_OURS:
            how = f"To see our version, add a cell below (Escape, then B), with check.{self._name()}.show_ours() in it."
            note = "\n".join(filter(None, [note, how]))
        display.show(verdicts, headline, note, found)
        prints.show()
        skipped = [verdict.check for verdict in missing if not verdict.ran]
        counts = [_count(failed, "failed")] * bool(failed) + [_count(skipped, "did not run")] * bool(skipped)
        # A program that executes notebooks reports only the error, without what is displayed above it.
        evidence = f" {missing[0].check}: {' '.join(missing[0].evidence.split())}"
        why = "" if reader.present() else evidence[:MOST_EVIDENCE]
        raise CheckFailed(f"Exercise {self.number}, {self.piece}: not there yet, {', '.join(counts)}.{why}")

    def show_ours(self) -> None:
        """Show our version of this exercise, and record in a lab that it was seen."""
        found = cells.help_for(progress.name_of(self))
        if not found.ours:
            print("There is no solution of this exercise in this folder.")
            return
        progress.record_look(self)
        display.show_ours(found.ours)

    def _name(self) -> str:
        return progress.name_of(self).rpartition(".")[2]

    def _save_for_later_labs(self) -> str:
        """Save the piece that has passed, if this is a lab. Returns a sentence if that is not possible, or ""."""
        module, _, name = progress.name_of(self).partition(".")
        if not name or not progress.in_a_lab():
            return ""
        try:
            mine.save(module, self.piece, ranks.current().definitions.cells)
        except (mine.NotSaved, OSError, SyntaxError) as error:
            return f"This exercise counts as it is. Later labs take our {self.piece}, because {error}."
        return ""


def run_exercise(
    exercise: Exercise,
    path: str | None = None,
    seed: int | None = None,
    only: str = "",
    prints: Prints | None = None,
    runner: Runner | None = None,
    report: Callable[[str], None] | None = None,
) -> list[Verdict]:
    """Run the checks of an exercise at every world size that they ask for and that there are ranks for.

    Args:
        path: The student's file; None checks what is defined on the ranks.
        seed: Repeats the random choices of an earlier run.
        only: The name of the only check to run; "" runs all of them.
        prints: Collects what the student's code prints.
        runner: Makes the attempts. By default, each is made once, with the usual sizes.
        report: Is told what runs, such as "values · 3 ranks".
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    checks = [check for check in exercise.checks if check.name == only or not only]
    if not checks:  # the check of that name belongs to another exercise for the same piece
        return []
    run = Run(exercise.piece, exercise.fallback_name, path, seed, runner or Runner())
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
                if report is not None:
                    report(f"{check.name} · {size} rank{'s' if size > 1 else ''}")
                attempt = run.judge(check, size)
                if prints is not None:
                    prints.add(check.name, size, attempt.printed, failed=attempt.wrong is not None)
                hangs += attempt.wrong.hangs if attempt.wrong else 0
        right_at_first = run.runner.try_again(run, checks) if hangs < MOST_HANGS else ""
    if path is None and ranks.current().starts != starts and not found:
        found[checks[0].name] = Wrong(_LEFT_IN_FLIGHT, HINT_ON_WAITS)
    _report_once(found, checks)
    for check in checks if right_at_first else ():
        found.setdefault(check.name, Wrong(f"{RIGHT_AT_FIRST} “{right_at_first}”"))
    for name, description in run.descriptions.items():
        found[name].evidence += description
    return [
        _not_run(exercise, check, f"runs when “{exercise.first}” passes")
        if exercise.first in found and check.name != exercise.first and not right_at_first
        else _verdict(exercise, check, tried[check.name], found.get(check.name))
        for check in checks
    ]


def not_written(verdicts: list[Verdict]) -> bool:
    """Tell whether the first check that ran found the line that students replace, and no check passed."""
    ran = [verdict for verdict in verdicts if verdict.ran]
    return bool(ran) and ran[0].evidence.startswith(NOT_WRITTEN) and not any(verdict.passed for verdict in ran)


def _report_once(found: dict[str, Wrong], checks: list[Check]) -> None:
    """Refer to an earlier check instead of repeating its evidence and its hint.

    A hint on the group is about one mistake, although the evidence depends on which rank fails first. So is a hint on
    an error that the same line of the piece raises, although the evidence depends on the model.
    """
    reported = {}
    for name in (check.name for check in checks if check.name in found):
        wrong = found[name]
        in_a_group = wrong.hint in (HINT_ON_GROUPS, HINT_ON_GROUP_RANKS)
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
