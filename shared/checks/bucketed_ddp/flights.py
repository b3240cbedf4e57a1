"""Are several messages under way at once? Told by what a rank launched and waited for, without a clock."""

from shared.checks.engine.framework import Wrong
from shared.checks.engine.latecomers import PATIENCE_S
from shared.checks.engine.steps import Event

_HINT_ON_TRAVEL = "Hint: what can this rank do while the first bucket travels?"


def launched_before_waiting(events: list[Event]) -> int:
    """Count the messages that were launched before the first wait."""
    kinds = [event.kind for event in events]
    return kinds.index("wait") if "wait" in kinds else len(kinds)


def judge_in_flight(rank: int, events: list[Event], context: str) -> None:
    """Raises: Wrong where a message was waited for before the last one was launched."""
    messages = sum(event.kind != "wait" for event in events)
    under_way = launched_before_waiting(events)
    if under_way < messages:
        evidence = f"{context}: {under_way} of {messages} messages were launched before the first was waited for"
        raise Wrong({rank: evidence}, _HINT_ON_TRAVEL)


def judge_latecomer(late: int, missing: list[int], messages: int, context: str) -> None:
    """Raises: Wrong where others launched less than everything while a rank had launched nothing: somebody waited."""
    if missing:
        evidence = (
            f"{context}: while rank {late} had launched nothing, this rank launched fewer than {messages} messages"
        )
        raise Wrong(dict.fromkeys(missing, f"{evidence} in {PATIENCE_S:g} s"), _HINT_ON_TRAVEL)
