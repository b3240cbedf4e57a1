"""Replace the hint of a failed check where another mistake is the real cause."""

import contextlib
import functools
from collections.abc import Callable

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import NOT_WRITTEN, Wrong
from shared.checks.engine.framework import Exercise

Judge = Callable[[Attempt], None]


def _amending(amend: Callable[[Wrong, Attempt], None]) -> Callable[[Judge], Judge]:
    """Let amend(wrong, attempt) change the hint if a judge finds something wrong."""

    def decorate(judge: Judge) -> Judge:
        @functools.wraps(judge)
        def judged(attempt: Attempt) -> None:
            try:
                judge(attempt)
            except Wrong as wrong:
                amend(wrong, attempt)
                raise

        return judged

    return decorate


def where_it_raises(hints: dict[str, str]) -> Callable[[Judge], Judge]:
    """Add hints for errors that the piece raises.

    Args:
        hints: The hints, by the words of the error message that they belong to.
    """

    def amend(wrong: Wrong, attempt: Attempt) -> None:
        if not wrong.hint:
            wrong.hint = next((hint for words, hint in hints.items() if words in wrong.evidence), "")
            wrong.hints_at_error = bool(wrong.hint)

    return _amending(amend)


@contextlib.contextmanager
def replacing_hints(hints: dict[str, str]):
    """Replace the hint of what fails inside, also as a decorator.

    Args:
        hints: The new hints, by the ones that they replace; "" stands for no hint.
    """
    try:
        yield
    except Wrong as wrong:
        wrong.hint = hints.get(wrong.hint, wrong.hint)
        raise


def give_hints(hints: dict[str, str], *exercises: Exercise) -> None:
    """Add the same hints for raised errors to all checks of some exercises."""
    for exercise in exercises:
        for check in exercise.checks:
            check.judge = where_it_raises(hints)(check.judge)


def begin_at(first: Judge, name: str) -> Callable[[Judge], Judge]:
    """Point at a more basic check if it fails, too.

    Args:
        first: The judge of the more basic check.
        name: The name of that check.
    """

    def amend(wrong: Wrong, attempt: Attempt) -> None:
        if wrong.evidence != NOT_WRITTEN and not wrong.hangs and _fails(first, attempt):
            wrong.hint = f"The check “{name}” fails, too. Start with that one."

    return _amending(amend)


def where_only_this_fails(first: Judge, hints: dict[str, str]) -> Callable[[Judge], Judge]:
    """Replace hints where a more basic check passes, so that the cause is what only this check tries.

    Args:
        first: The judge of the more basic check.
        hints: The new hints, by the ones that they replace.
    """

    def amend(wrong: Wrong, attempt: Attempt) -> None:
        if wrong.hint in hints and not _fails(first, attempt):
            wrong.hint = hints[wrong.hint]

    return _amending(amend)


def _fails(judge: Judge, attempt: Attempt) -> bool:
    try:
        judge(attempt)
    except Exception:  # Wrong, or an error while comparing what the piece returned
        return True
    return False
