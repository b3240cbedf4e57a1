"""How large the models and how long the trainings of a check are.

In a student's own check, they are small, so that it is fast. In grading, they are drawn for each judgement, so that
code cannot be right only for the usual sizes. On two ranks, the models are large. The first training of a check is a
few steps longer than usual. If such a check fails, it runs again with the usual number of steps, to find out whether
the code is right only at first. Otherwise, one of the checks that train is drawn at the end, and runs again with a much
longer training. If no check trains, the first of those that passed and a drawn one run again. Their first probe is then
called many times, with the same arguments and without loading the code in between.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shared.checks.models import awkward_models
from shared.deadlines import scaled

LARGE_ON = 2  # ranks
LARGE, MEDIUM = range(1_001, 4_000), range(8, 200)  # hidden units of the awkward models
LONG, SHORT, NONE = range(15, 40), range(1, 5), range(1)  # steps that are added to the usual number of steps
FURTHER = range(2)  # steps that are added to the later trainings of a check
FEWEST_REPEATS, MOST_REPEATING_S, SLOW_S = 4, 1.0, 3.0  # Slow probes run less often.


@dataclass
class DrawnSizes:
    """The sizes of one attempt. Without `draws`, they are the usual ones."""

    width: int = awkward_models.USUAL_WIDTH
    draws: random.Random | None = None
    longest: int = 0  # steps
    added: range = SHORT  # the steps that are added to the first training
    repeats: int = 0  # how many times the first probe of a check without a training was called again
    has_models: bool = False  # whether the check has built awkward models

    @classmethod
    def drawn(cls, draws: random.Random, world_size: int, added: range = SHORT) -> "DrawnSizes":
        """Draw the width of the models. As usual, no world size up to 4 divides their number of elements."""
        widths = LARGE if world_size == LARGE_ON else MEDIUM
        return cls(draws.choice([width for width in widths if width % 3]), draws, added=added)

    @property
    def learning_rate_factor(self) -> float:
        """A factor for learning rates, because long trainings diverge with the usual ones."""
        return 1.0 if self.draws is None else 0.02

    def steps(self, usual: int) -> int:
        """Return how many steps a training takes whose usual number of steps is given."""
        if self.draws is None or usual == 0:
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

    def pick(self, usual: int, drawn: range) -> int:
        """Return the usual number or, in grading, one that is drawn from a range."""
        return usual if self.draws is None else self.draws.choice(drawn)

    def __str__(self) -> str:
        """Say what was drawn and used, or return "" if no size was."""
        models = [f"models of {self.width} hidden units"] if self.has_models else []
        steps = [f"up to {self.longest} steps"] * bool(self.longest)
        return ", ".join(models + steps + [f"called {self.repeats} times"] * bool(self.repeats))


@contextlib.contextmanager
def models_of(scale: DrawnSizes) -> Iterator[None]:
    """Build awkward models of this scale's width. The kernel and the ranks build the same models."""
    awkward_models.WIDTH, awkward_models.built = scale.width, False
    try:
        yield
    finally:
        scale.has_models |= awkward_models.built
        awkward_models.WIDTH = awkward_models.USUAL_WIDTH
