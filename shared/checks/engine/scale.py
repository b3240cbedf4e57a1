"""How large the models and how long the trainings of a check are.

In a student's own check, they are small, so that it is fast. In grading, they are drawn for each judgement, so that
code cannot be right only for the usual sizes. On two ranks, the models are large. Each training is a few steps longer
than usual. At the end, one check that has passed is drawn, and runs again with a training that is much longer.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shared.checks.models import awkward_models

LARGE_ON = 2  # ranks
LARGE, MEDIUM = range(1_001, 4_000), range(8, 200)  # hidden units of the awkward models
LONG, SHORT = range(15, 40), range(1, 5)  # steps that are added to the usual number of steps


@dataclass
class Scale:
    """The sizes of one attempt. Without `draws`, they are the usual ones."""

    width: int = awkward_models.USUAL_WIDTH
    draws: random.Random | None = None
    longest: int = 0  # steps
    is_long: bool = False  # whether the first training is much longer than usual
    has_models: bool = False  # whether the check has built awkward models

    @classmethod
    def drawn(cls, draws: random.Random, world_size: int, is_long: bool = False) -> "Scale":
        """Draw the width of the models. As usual, no world size up to 4 divides their number of elements."""
        widths = LARGE if world_size == LARGE_ON else MEDIUM
        return cls(draws.choice([width for width in widths if width % 3]), draws, is_long=is_long)

    @property
    def calmness(self) -> float:
        """A factor for learning rates, because long trainings diverge with the usual ones."""
        return 1.0 if self.draws is None else 0.02

    def steps(self, usual: int) -> int:
        """Return how many steps a training takes whose usual number of steps is given."""
        if self.draws is None or usual == 0:
            return usual
        steps = usual + self.draws.choice(LONG if self.is_long and not self.longest else SHORT)
        self.longest = max(self.longest, steps)
        return steps

    def number(self, usual: int, drawn: range) -> int:
        """Return a usual number, or in grading one that is drawn."""
        return usual if self.draws is None else self.draws.choice(drawn)

    def __str__(self) -> str:
        """Say what was drawn and used, or return "" if no size was."""
        models = [f"models of {self.width} hidden units"] if self.has_models else []
        return ", ".join(models + [f"up to {self.longest} steps"] * bool(self.longest))


@contextlib.contextmanager
def models_of(scale: Scale) -> Iterator[None]:
    """Build awkward models of this scale's width. The kernel and the ranks build the same models."""
    awkward_models.WIDTH, awkward_models.built = scale.width, False
    try:
        yield
    finally:
        scale.has_models |= awkward_models.built
        awkward_models.WIDTH = awkward_models.USUAL_WIDTH
