"""What a check says about code that is wrong, and about a failed call of it: an error, a hang or a dead rank."""

from collections.abc import Callable, Mapping

from shared.ranks.diagnosis import (
    CellState,
    absent,
    dropped_handles,
    name_ranks,
    own_errors,
    receives_too_small,
    tags_differ,
)
from shared.ranks.errors import CellFailed, RanksError

NOT_WRITTEN = "it is not written yet"
HINT_ON_STUBS = "Replace the line `raise NotImplementedError(…)` and run its cell again."
OUTSIDE_THE_GROUP = "but this rank's group is"  # in the error for a call that would leave the group
HINT_ON_WAITS = "Hint: do you call wait() on the handle of every isend and irecv?"
_HINT_ON_COLLECTIVES = "Hint: which ranks call this collective, and which never reach it?"
HINT_ON_GROUPS = "Hint: this collective runs over all ranks. Which call in your code leaves out the group?"
HINT_ON_GROUP_RANKS = (
    "Hint: does every call get `group`? And is each rank given by its index in the group, or by its global rank?"
)
_HINT_ON_WAITING = "Hint: which call would end this wait, and what keeps the other rank from reaching it?"
_HINT_ON_PARTNERS = "Hint: from which rank does each rank receive, and does that rank send to it?"
_HINT_ON_MISSING_SIDE = "Hint: which line of your function should make rank"  # and so on
_HINT_ON_TAGS = (
    "Hint: from which rank does this line receive, and with which tag? Does that rank send to it with the same tag?"
)
_HINT_ON_SIZES = "Hint: what are the shape and dtype of the tensor that is sent to this rank?"
_HINT_ON_LOOPS = "Hint: is this line in a loop? If so, what would end the loop?"
_HINT_ON_ITSELF = "Hint: for which ranks should this line not run?"
_IN_A_FILE = {  # how a file can define the names that a rank defines for %%ranks cells
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "rank": "rank = dist.get_rank()",
    "world_size": "world_size = dist.get_world_size()",
    "device": "device = tensor.device",
}
_UNWRITTEN = ("NotImplementedError: your code here", "NotImplementedError")
_NOT_DONE = (
    "the call returned, but the barrier after it did not complete: a transfer that it launched is still in flight, or "
    "its handle was discarded before it completed"
)


class Wrong(Exception):
    """The error that a failed check raises.

    Args:
        evidence: What was expected and what happened: one text, or one for each rank.
        hint: A hint that points at the mistake without giving the answer.
    """

    def __init__(self, evidence: str | dict[int, str], hint: str = ""):
        super().__init__(evidence)
        self.evidence = _merge(evidence) if isinstance(evidence, dict) else evidence
        self.hint = hint
        self.hangs = 0
        self.hints_at_error = False  # whether the hint is about the error that the piece raised


def expect(found: Mapping[int, object], holds: Callable, evidence: str | Callable, hint: str = "") -> None:
    """Fail the check unless a claim holds for what was found on each rank.

    Args:
        found: What was found, by global rank.
        holds: Tells whether the claim holds.
        evidence: What to say about a rank for which it does not, or a function that says so.
        hint: The hint.

    Raises:
        Wrong: If it does not hold.
    """
    wrong = {rank: own for rank, own in found.items() if not holds(own)}
    if wrong:
        raise Wrong({rank: evidence(own) if callable(evidence) else evidence for rank, own in wrong.items()}, hint)


class Unusable(RanksError):
    """The error for a file that cannot be imported or does not define the piece to check."""


def hint_on_names(evidence: str) -> str:
    """Return a hint if a file uses a name that only %%ranks cells have, or ""."""
    for name, code in _IN_A_FILE.items():
        if f"NameError: name '{name}' is not defined" in evidence:
            return f"Only %%ranks cells have `{name}`. In a file, define it yourself, for example: `{code}`."
    return ""


def from_failure(failure: CellFailed) -> Wrong:
    """Describe how a piece raised, hung or killed its rank, in the doctor's words."""
    errors = [outcome.error for outcome in failure.outcomes.values() if outcome.error]
    # Only the first line counts, as notes may follow it. Torch raises NotImplementedError with other messages.
    if any(error["message"].split("\n")[0] in _UNWRITTEN for error in errors):
        return Wrong(NOT_WRITTEN, HINT_ON_STUBS)
    missing = next((error for error in errors if error["kind"] == "PieceMissing"), None)
    if missing:
        raise Unusable(missing["message"].split(": ", 1)[1])
    wrong = Wrong(failure.explanation.strip(), _hint_on(failure))
    raised = own_errors(failure.cell)
    if (handles := dropped_handles(failure.cell)) and not raised:
        wrong = Wrong("\n".join(handles), HINT_ON_WAITS)
    elif _waits_behind_the_call(failure):
        wrong = Wrong(_NOT_DONE, HINT_ON_WAITS)
    outside = [rank for rank, position in failure.cell.positions.items() if _in_our_barrier(position)]
    if outside and not raised and wrong.evidence != _NOT_DONE:
        verb = "is" if len(outside) == 1 else "are"
        wrong.evidence += f"\n{name_ranks(outside).capitalize()} {verb} not in your code: that barrier is the check's."
    wrong.hangs = 1 if len(failure.cell.outcomes) < len(failure.cell.targets) else 0
    return wrong


def _waits_behind_the_call(failure: CellFailed) -> bool:
    """Return whether the ranks have left the student's code and hang in the barrier that the check runs after it.

    If a rank has raised an error, the others wait there only for this rank.
    """
    if own_errors(failure.cell):
        return False
    found = [position for position in failure.cell.positions.values() if position and position["busy"]]
    return bool(found) and all(map(_in_our_barrier, found))


def _in_our_barrier(position: dict | None) -> bool:
    """Return whether a rank is outside the student's code, in a barrier of the check."""
    called = position["call"] if position and position["busy"] and not position["line"] else None
    return bool(called) and called["op"] == "barrier"


def _hint_on(failure: CellFailed) -> str:
    """Hint at collectives only if a rank is waiting in one and no rank has raised an error of its own."""
    if any(receives_too_small(failure.cell, rank) for rank in failure.cell.deaths):
        return _HINT_ON_SIZES
    errors = [outcome.error for outcome in failure.cell.outcomes.values() if outcome.error]
    if any(is_a_transfer_to_itself(error["message"]) for error in errors):
        return _HINT_ON_ITSELF
    if errors:
        return ""
    found = [position for position in failure.cell.positions.values() if position]
    waiting = [each["call"] for each in found if each["busy"] and each["waits"] != "no" and not _in_our_barrier(each)]
    if not waiting and not failure.cell.deaths and any(_runs_own_code(position) for position in found):
        return _HINT_ON_LOOPS
    in_collectives = waiting and all(call and call["partner"] is None for call in waiting)
    uses_transfers = any(len(lane) > 1 for position in found for lane, _ in position["counts"])  # between two ranks
    if uses_transfers and not in_collectives:
        return _hint_on_transfers(failure.cell, [position for position in found if position["busy"]])
    waits = any(position["busy"] and position["waits"] != "no" for position in found)
    return _HINT_ON_COLLECTIVES if waits else ""


def _runs_own_code(position: dict) -> bool:
    return position["busy"] and position["waits"] == "no" and bool(position["line"])


def _ignores_the_group(failure: CellFailed) -> bool:
    """Return whether a rank waits in a collective over all ranks of its world."""
    calls = [p["call"] for p in failure.cell.positions.values() if p and p["busy"] and p["waits"] != "no"]
    return any(call and call["partner"] is None and call["group"] == failure.cell.targets for call in calls)


def hint_in_a_group(wrong: Wrong, failure: CellFailed) -> str:
    """Hint at the group if only its ranks called the piece, and one of them tried to communicate with other ranks."""
    among_all = OUTSIDE_THE_GROUP in wrong.evidence and " among ranks " in wrong.evidence
    if among_all or (wrong.hint == _HINT_ON_COLLECTIVES and _ignores_the_group(failure)):
        return HINT_ON_GROUPS
    outside = OUTSIDE_THE_GROUP in wrong.evidence or "is not part of group" in wrong.evidence
    stuck = wrong.hint.startswith((_HINT_ON_ITSELF, _HINT_ON_WAITING, _HINT_ON_PARTNERS, _HINT_ON_MISSING_SIDE))
    return HINT_ON_GROUP_RANKS if outside or stuck else wrong.hint


def is_a_transfer_to_itself(text: str) -> bool:
    """Return whether an error says that a rank sends to itself or receives from itself."""
    return "Invalid destination rank" in text or "Invalid source rank" in text


def _hint_on_transfers(cell: CellState, running: list[dict]) -> str:
    """Hint at tags, at a rank that has returned without its side of a transfer, or else at partners or at the order.

    If each rank has launched as many sends as receives, their order does not matter.
    """
    if any(position["waits"] != "no" and tags_differ(position, cell) for position in running):
        return _HINT_ON_TAGS
    for position in running:
        missing = absent(position, cell)
        returned = [rank for rank in missing if rank in cell.outcomes or _in_our_barrier(cell.positions.get(rank))]
        if position["call"] and position["call"]["partner"] is not None and returned:
            here, there = ("send", "receive") if position["call"]["op"] == "send" else ("receive", "send")
            return f"{_HINT_ON_MISSING_SIDE} {returned[0]} {there}? Or should rank {position['rank']} not {here}?"
    if running and all(_launched(position, "send") == _launched(position, "recv") for position in running):
        return _HINT_ON_PARTNERS
    handles = any(".wait(" in (position["line"] or "") for position in running)
    return _HINT_ON_WAITING + (" And do you call wait() on the handle of each transfer?" if handles else "")


def _launched(position: dict, op: str) -> int:
    return sum(count for lane, count in position["counts"] if len(lane) > 1 and lane[1] == op)


def _merge(by_rank: dict[int, str]) -> str:
    """Merge equal evidence from several ranks into one line."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(by_rank.items()):
        groups.setdefault(text, []).append(rank)
    return "\n".join(f"{name_ranks(members)} │ {text}" for text, members in groups.items())
