"""Run checks as grading does: with drawn sizes, longer trainings, and a measurement from outside.

The sizes are drawn for each judgement, so that code cannot be right only for the usual sizes. On two ranks, the models
are large. The first training of a check is a few steps longer than usual. If such a check fails, it runs again with the
usual number of steps, to find out whether the code is right only at first. Otherwise, one of the checks that train is
drawn at the end, and runs again with a much longer training. If no check trains, the first of those that passed and a
drawn one run again. Their first probe is then called many times, with the same arguments and without loading the code
in between.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from instructor.grade.network_meter import Meter
from shared import ranks
from shared.checks.engine.attempts import PROBE_TIMEOUT_S, Attempt, Check, Run, Runner
from shared.checks.engine.candidate import Report
from shared.checks.engine.failures import NOT_WRITTEN, Wrong
from shared.checks.engine.sizes import LARGE_ON, Sizes
from shared.deadlines import scaled

LARGE, MEDIUM = range(1_001, 4_000), range(8, 200)  # hidden units of the awkward models
LONG, SHORT, NONE = range(15, 40), range(1, 5), range(1)  # steps that are added to the usual number of steps
FURTHER = range(2)  # steps that are added to the later trainings of a check
FEWEST_REPEATS, MOST_REPEATING_S, SLOW_S = 4, 1.0, 3.0  # Slow probes run less often.
_HINT_ON_OTHER_WAYS = "Every value must be sent by the collectives that the exercise asks for."


@dataclass
class DrawnSizes(Sizes):
    """Sizes that are drawn when they are asked for."""

    draws: random.Random = field(default_factory=random.Random)
    longest: int = 0  # steps
    added: range = SHORT  # the steps that are added to the first training
    repeats: int = 0  # how many times the first probe of a check without a training was called again

    @classmethod
    def drawn(cls, draws: random.Random, world_size: int, added: range = SHORT) -> "DrawnSizes":
        """Draw the width of the models. As usual, no world size up to 4 divides their number of elements."""
        widths = LARGE if world_size == LARGE_ON else MEDIUM
        return cls(draws.choice([width for width in widths if width % 3]), draws=draws, added=added)

    @property
    def learning_rate_factor(self) -> float:
        """A factor for learning rates, because long trainings diverge with the usual ones."""
        return 0.02

    def steps(self, usual: int) -> int:
        """Return how many steps a training takes whose usual number of steps is given."""
        if usual == 0:
            return usual
        steps = usual + self.draws.choice(FURTHER if self.longest and self.added != NONE else self.added)
        self.longest = max(self.longest, steps)
        return steps

    def times(self, seconds: float) -> int:
        """Return how many more times to call a probe that has run once. It may be 0.

        Args:
            seconds: How long the first call took.
        """
        if self.added != LONG or self.longest or self.repeats:
            return 0
        fewest = FEWEST_REPEATS if seconds < scaled(SLOW_S) else 1
        self.repeats = min(self.draws.choice(LONG), max(fewest, int(scaled(MOST_REPEATING_S) / seconds)))
        return self.repeats

    def pick(self, usual: int, others: range) -> int:
        return self.draws.choice(others)

    def __str__(self) -> str:
        """Say what was drawn and used, or return "" if no size was."""
        models = [f"models of {self.width} hidden units"] if self.has_models else []
        steps = [f"up to {self.longest} steps"] * bool(self.longest)
        return ", ".join(models + steps + [f"called {self.repeats} times"] * bool(self.repeats))


@dataclass
class GradingRunner(Runner):
    """Draws the sizes of all attempts.

    Args:
        meter: Compares what the ranks say they send with what the network carries. None if this cannot be measured.
    """

    meter: Meter | None = None
    added: range = SHORT  # the steps that are added to the trainings of the attempts from now on

    def sizes(self, draw: random.Random, world_size: int) -> DrawnSizes:
        return DrawnSizes.drawn(draw, world_size, self.added)

    def probe(self, attempt: Attempt, call: Callable[..., tuple[list, list[Report]]]) -> list:
        """Call a probe once, and again if its sizes say so. Measures what the ranks send."""
        began_s = time.monotonic()
        results = self._measured(attempt, call)
        took_s = time.monotonic() - began_s
        if times := _drawn(attempt).times(took_s):
            timeout_s = PROBE_TIMEOUT_S + 2 * times * took_s
            results = self._measured(attempt, lambda: call(times=times, timeout_s=timeout_s))
        return results

    def _measured(self, attempt: Attempt, call: Callable[..., tuple[list, list[Report]]]) -> list:
        if self.meter:
            self.meter.begin()
        results, reports = call()
        sizes = _drawn(attempt)
        steps = max(sizes.longest, sizes.fed_steps, sizes.repeats * max(1, sizes.fed_steps))
        if self.meter and (what := self.meter.contradicts(reports, steps)):
            raise Wrong(what, _HINT_ON_OTHER_WAYS)
        return results

    def describe(self, run: Run, attempt: Attempt) -> str:
        """Say what was drawn."""
        if attempt.wrong and attempt.wrong.evidence == NOT_WRITTEN:
            return ""
        sizes = f": {attempt.sizes}" if str(attempt.sizes) else ""
        return f"\n(Drawn with seed {run.seed}{sizes}.)"

    def try_again(self, run: Run, checks: list[Check]) -> str:
        """Look for code that is right at first and wrong later. Returns the name of a check that shows this, or "".

        A result counts only if it occurs twice. Code that is wrong at random, for example because of a race, therefore
        loses only the checks that it fails, and a machine that is slow for a moment costs nothing.
        """
        for check, attempt in run.attempts:
            if _drawn(attempt).longest and attempt.wrong and not attempt.wrong.hangs:
                size = attempt.world_size
                ranks.current().regroup(list(range(size)))
                as_usual = [self._attempt(run, check, size, NONE).wrong is None for _ in range(2)]
                return check.name if all(as_usual) and self._attempt(run, check, size, SHORT).wrong else ""
        for check, size in self._draw_long(run, checks):
            ranks.current().regroup(list(range(size)))
            attempt = self._attempt(run, check, size, LONG)
            if attempt.wrong and self._attempt(run, check, size, LONG).wrong:
                run.note(check, attempt)
                return check.name
        return ""

    def _attempt(self, run: Run, check: Check, size: int, added: range) -> Attempt:
        """Make an attempt with these steps added to its trainings."""
        self.added = added
        try:
            return run.attempt(check, size, " long" * (added == LONG))
        finally:
            self.added = SHORT

    def _draw_long(self, run: Run, checks: list[Check]) -> list[tuple[Check, int]]:
        """Draw which checks run for longer, and on how many ranks: on more than one rank, if possible."""
        draw = random.Random(f"{run.seed} long")
        trained = [(check, attempt.world_size) for check, attempt in run.attempts if _drawn(attempt).longest]
        if trained:
            return [draw.choice([each for each in trained if each[1] > 1] or trained)]
        sizes = {check.name: [a.world_size for each, a in run.attempts if each is check] for check in checks}
        passed = [each for each in checks if sizes[each.name] and each.name not in run.found and not each.once]
        several = [passed[0], draw.choice(passed)] if passed else []
        return [(check, draw.choice([s for s in sizes[check.name] if s > 1] or sizes[check.name])) for check in several]


def _drawn(attempt: Attempt) -> DrawnSizes:
    """Return the sizes of an attempt, which `GradingRunner.sizes` has drawn."""
    assert isinstance(attempt.sizes, DrawnSizes)
    return attempt.sizes
