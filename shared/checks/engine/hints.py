"""Better words for a check that failed, where its own hint would lead astray: another cause lies below."""

import functools
from collections.abc import Callable

from shared.checks.engine.framework import NOT_WRITTEN, RUN_AGAIN, Attempt, Exercise, Wrong

Judge = Callable[[Attempt], None]


def where_it_raises(hints: dict[str, str]) -> Callable[[Judge], Judge]:
    """Give a judge hints for errors of the piece. hints: words of the error → hint"""

    def decorate(judge: Judge) -> Judge:
        @functools.wraps(judge)
        def judged(attempt: Attempt) -> None:
            try:
                judge(attempt)
            except Wrong as wrong:
                if wrong.hint in ("", RUN_AGAIN):
                    hint = next((hint for words, hint in hints.items() if words in wrong.evidence), "")
                    wrong.hint = f"{hint} {wrong.hint}".strip()
                raise

        return judged

    return decorate


def give_hints(hints: dict[str, str], *exercises: Exercise) -> None:
    """Give all checks of some exercises the same hints for errors of their pieces."""
    for exercise in exercises:
        for check in exercise.checks:
            check.judge = where_it_raises(hints)(check.judge)


def begin_at(first: Judge, name: str) -> Callable[[Judge], Judge]:
    """Let a judge that fails point at the check of that name, where `first` of it fails as well."""

    def decorate(judge: Judge) -> Judge:
        @functools.wraps(judge)
        def judged(attempt: Attempt) -> None:
            try:
                judge(attempt)
            except Wrong as wrong:
                if wrong.evidence != NOT_WRITTEN and not wrong.hangs and _fails(first, attempt):
                    wrong.hint = f"The check “{name}” fails too. Begin there."
                raise

        return judged

    return decorate


def _fails(judge: Judge, attempt: Attempt) -> bool:
    try:
        judge(attempt)
    except Exception:  # Wrong, or the piece left something that cannot be compared
        return True
    return False
