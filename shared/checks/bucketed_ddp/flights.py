"""Check that several messages are in flight at once, from a rank's launches and waits. No clock is involved."""

from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S
from shared.checks.engine.steps import Event

_HINT_ON_TRAVEL = "Hint: what can this rank do while the first bucket is in flight?"


def launched_before_waiting(events: list[Event]) -> int:
    """Count the messages that were launched before the first wait."""
    kinds = [event.kind for event in events]
    return kinds.index("wait") if "wait" in kinds else len(kinds)


def judge_in_flight(rank: int, events: list[Event], context: str) -> None:
    """Check that all messages are launched before the first wait.

    Raises:
        Wrong: If they are not.
    """
    messages = sum(event.kind != "wait" for event in events)
    in_flight = launched_before_waiting(events)
    if in_flight < messages:
        evidence = f"{context}: only {in_flight} of {messages} collectives were launched before the first wait"
        raise Wrong({rank: evidence}, _HINT_ON_TRAVEL)


def judge_late_rank(late: int, missing: list[int], messages: int, context: str) -> None:
    """Check that all other ranks launched all of their messages while one rank had launched none.

    Raises:
        Wrong: If a rank did not.
    """
    if missing:
        evidence = (
            f"{context}: while rank {late} had launched nothing, this rank launched fewer than {messages} collectives"
        )
        raise Wrong(dict.fromkeys(missing, f"{evidence} in {PATIENCE_S:g} s"), _HINT_ON_TRAVEL)
