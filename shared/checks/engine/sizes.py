"""How large the models and data, and how long the trainings of a check are.

In a student's own check, all of them are as usual: so small that it is fast. A `Runner` may draw other sizes.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from shared.checks.models import awkward_models

LARGE_ON = 2  # ranks; a check that draws one large size draws it there


@dataclass
class Sizes:
    """The sizes of one attempt: here, the usual ones."""

    width: int = awkward_models.USUAL_WIDTH
    has_models: bool = False  # whether the check has built awkward models
    fed_steps: int = 0  # the steps of the last probe that was given all its gradients, so that none may be added

    @property
    def learning_rate_factor(self) -> float:
        return 1.0

    def steps(self, usual: int) -> int:
        """Return how many steps a training takes whose usual number of steps is given."""
        return usual

    def pick(self, usual: int, others: range) -> int:
        """Return the usual number. Sizes that are drawn return one of the others instead."""
        return usual


@contextlib.contextmanager
def models_of(sizes: Sizes) -> Iterator[None]:
    """Build awkward models of this width. The kernel and the ranks build the same models."""
    awkward_models.WIDTH, awkward_models.built = sizes.width, False
    try:
        yield
    finally:
        sizes.has_models |= awkward_models.built
        awkward_models.WIDTH = awkward_models.USUAL_WIDTH
