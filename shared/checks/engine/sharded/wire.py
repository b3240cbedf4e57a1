"""Check what a sharded optimizer sends: one reduce-scatter of the gradients and one all-gather of the parameters.

All ranks together send (N−1)Ψ elements in a reduce-scatter or an all-gather of Ψ elements. Every way to do that is
right: torch's collective, a ring of sends and receives, an all-to-all. A flat tensor may be padded to a multiple of N.
"""

from dataclasses import dataclass

from shared import wire
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong, expect
from shared.wire import instrumentation

Phases = dict[str, list[instrumentation.Call]]  # what a rank sends in a step, by phase
_HINTS = {
    "barrier": "Hint: which of these messages sends a gradient or a parameter?",
    "all_reduce": "An all_reduce gives every rank the whole sum. Hint: which shard of it does this rank need?",
    "broadcast": "Hint: which single collective gives every rank all shards?",
    "all_gather": "Hint: is anything all-gathered that every rank already has, or that only its owner needs?",
}
_HINT_ON_BYTES = (
    "Hint: which bytes must a rank send to complete the sum of a shard, and which to give the result to all ranks?"
)
_HINT_ON_NOTHING = "Nothing is sent. Hint: which collective sends shards to other ranks, and is it launched here?"
HINT_ON_AGAIN = (
    "A whole synchronization is repeated. Hint: how does step() know that gradients are already synchronized?"
)
_HINT_ON_EARLY = "Hint: what can wait until step()?"
_HINT_ON_SILENCE = "Hint: which line launches the collective, and does it check whether no_sync() is active?"
_HINT_ON_MESSAGES = "Hint: how many parameters does one collective send?"


@dataclass(frozen=True)
class Flat:
    """A flat tensor: elements of one dtype, side by side."""

    numbers: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.numbers * self.itemsize

    def filled_bytes(self, world_size: int) -> int:
        return -(-self.numbers // world_size) * world_size * self.itemsize


def flats_of(groups: list[list]) -> list[Flat]:
    """List one flat tensor for each param group and dtype of its trainable parameters."""
    found = []
    for parameters in groups:
        kinds: dict = {}
        for parameter in parameters:
            if parameter.requires_grad:
                kinds.setdefault(parameter.dtype, []).append(parameter)
        found += [Flat(sum(p.numel() for p in alike), kind.itemsize) for kind, alike in kinds.items()]
    return found


def judge_traffic(
    sent: dict[int, list[Phases]], flats: list[Flat], context: str, rounds_in: dict[str, int], again: str = ""
) -> None:
    """Compare what each step of a training sends with what the flat tensors need.

    Args:
        sent: What each rank sent in each step, by global rank.
        flats: The flat tensors.
        context: What was tried.
        rounds_in: The rounds, by phase of a step, or by several phases: "backward() and step()".
        again: The hint for a step() that sends one or more whole rounds too many.

    Raises:
        Wrong: If a step sends more or less in a phase, or anything where it needs no rounds.
    """
    for step_index in range(len(next(iter(sent.values())))):
        for phases, rounds in rounds_in.items():
            calls = {
                rank: [call for phase in phases.split(" and ") for call in steps[step_index].get(phase, ())]
                for rank, steps in sent.items()
            }
            message = f"{context}, step {step_index + 1}, {phases}"
            if rounds:
                judge_rounds(calls, flats, rounds, message, again if "step()" in phases else "")
            else:
                reject_messages(calls, message, _HINT_ON_SILENCE if phases == "no_sync()" else _HINT_ON_EARLY)


def judge_rounds(
    calls: dict[int, list[instrumentation.Call]], flats: list[Flat], rounds: int, context: str, again: str = ""
) -> None:
    """Compare what was sent with what the flat tensors need.

    Args:
        calls: What each rank sent, by global rank.
        flats: The flat tensors.
        rounds: 1 for a reduce-scatter or an all-gather of each flat tensor, 2 for both.
        context: What was tried.
        again: The hint for a rank that sends one or more whole rounds too many.

    Raises:
        Wrong: If the ranks send more bytes or more messages than needed, or too few bytes.
    """
    others = len(calls) - 1
    least, most = rounds * sum(f.nbytes for f in flats), rounds * sum(f.filled_bytes(len(calls)) for f in flats)
    sent = {rank: sum(wire.sent_bytes_of(call, rank) for call in own) for rank, own in calls.items()}
    for rank, own in calls.items():
        message = f"{context}: {describe_calls([call for call in own if call.op != 'recv'])}"
        hint = next((hint for op, hint in _HINTS.items() if any(call.op.startswith(op) for call in own)), "")
        if sent[rank] > most * others / len(calls) + 1e-6:
            expected = f"this rank sends {sent[rank]:,.0f} bytes; expected {most * others / len(calls):,.0f}"
            repeated = again if abs(sent[rank] % (most / rounds * others / len(calls))) < 1e-6 else ""
            raise Wrong({rank: f"{message}; {expected}"}, hint or repeated or _HINT_ON_BYTES)
        messages = sum(1 if call.op == "send" else others for call in own if call.op != "recv")
        if messages > rounds * len(flats) * others:
            most_calls = rounds * len(flats)
            expected = f"expected {most_calls} collective{'s' if most_calls > 1 else ''}"
            by_ring = f", or {others} sends instead of each" if others > 1 else ""
            raise Wrong({rank: f"{message}; {expected}{by_ring}"}, hint or _HINT_ON_MESSAGES)
    if others and sum(sent.values()) < least * others - 1e-6:
        message = f"all ranks together send {sum(sent.values()):,.0f} bytes; a ring sends {least * others:,}"
        hint = "Hint: is every element sent in its own dtype?"
        raise Wrong(f"{context}: {message}", hint if any(sent.values()) else _HINT_ON_NOTHING)


def reject_messages(calls: dict[int, list[instrumentation.Call]], context: str, hint: str = _HINT_ON_EARLY) -> None:
    """Check that nothing is sent.

    Raises:
        Wrong: If anything is.
    """
    expect(calls, lambda own: not own, lambda own: f"{context}: {describe_calls(own)}; expected none", hint)
