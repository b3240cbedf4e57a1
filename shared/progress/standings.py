"""The contents of a student's record: the runs of each exercise's checks, and the status that follows from them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One run of an exercise's checks, or a look at our version of it."""

    at: str  # ISO 8601, local time
    exercise: str  # the name that its lab uses, such as "first_collectives.pass_right"
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    saw_ours: bool = False

    @property
    def all_passed(self) -> bool:
        return bool(self.passed) and not self.failed


@dataclass(frozen=True)
class Standing:
    """The status of one exercise according to the record."""

    first_passed: Run | None = None
    newest: Run | None = None
    saw_ours: bool = False  # before it first passed


def standings(found: list[Run]) -> dict[str, Standing]:
    """Return the standing of each exercise that was tried, from runs in order of time."""
    by_exercise: dict[str, Standing] = {}
    for run in found:
        before = by_exercise.get(run.exercise, Standing())
        saw_ours = before.saw_ours or (run.saw_ours and before.first_passed is None)
        first = before.first_passed or (run if run.all_passed else None)
        by_exercise[run.exercise] = Standing(first, before.newest if run.saw_ours else run, saw_ours)
    return by_exercise
