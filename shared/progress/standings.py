"""The contents of a student's record: the runs of each exercise's checks, and the status that follows from them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One run of an exercise's checks."""

    at: str  # ISO 8601, local time
    exercise: str  # the name that its lab uses, such as "first_collectives.pass_right"
    passed: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def all_passed(self) -> bool:
        return not self.failed


@dataclass(frozen=True)
class Standing:
    """The status of one exercise according to the record."""

    first_passed: Run | None = None
    newest: Run | None = None


def standings(found: list[Run]) -> dict[str, Standing]:
    """Return the standing of each exercise that was tried, from runs in order of time."""
    by_exercise: dict[str, Standing] = {}
    for run in found:
        first = by_exercise.get(run.exercise, Standing()).first_passed
        by_exercise[run.exercise] = Standing(first or (run if run.all_passed else None), run)
    return by_exercise
