"""Check that a piece rejects what it cannot do, with an error that says why."""

from collections.abc import Callable, Iterable

from shared.checks.engine.failures import Wrong

Error = tuple[str, str]  # its type and its message; the type is "no error" if nothing was raised
HINT_ON_PURPOSE = "Hint: does your code reject it on purpose, or does something else fail?"


def error_of(call: Callable[[], object]) -> Error:
    """Return the error that a call raises."""
    try:
        call()
    except NotImplementedError:  # the piece is not written yet
        raise
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def judge_errors(
    errors: Iterable[Error], context: str, kind: str = "RuntimeError", names: str = "", hint: str = ""
) -> None:
    """Check that each rank raised an error of this kind, with a message that names something.

    Args:
        errors: By rank.
        context: What raises the error.
        kind: The type of the error.
        names: What the message must name.
        hint: The hint for a rank that raised no error.

    Raises:
        Wrong: If a rank did not.
    """
    for rank, (raised, message) in enumerate(errors):
        if raised != kind or not message.strip() or names not in message:
            found = f"{raised}({message[:80]!r})" if message else raised
            expected = f"expected a {kind} that {f'names {names}' if names else 'says why'}"
            evidence = f"{context} raises {found}; {expected}"
            raise Wrong({rank: evidence}, hint if raised == "no error" else HINT_ON_PURPOSE)
