"""What a wrapper may send: the state once when it is built, each trainable parameter's gradient once per step."""

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Wrong
from shared.checks.models import awkward
from shared.wire import instrumentation


def trainable_bytes(model: str) -> int:
    return sum(p.nbytes for p in awkward.build(model, 0).parameters() if p.requires_grad)


def state_bytes(model: str) -> int:
    module = awkward.build(model, 0)
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


def judge_state_bytes(rank: int, calls: list[instrumentation.Call], model: str) -> None:
    """Raises: Wrong unless every parameter and buffer was broadcast once."""
    if sum(call.payload_bytes for call in calls) != state_bytes(model) or any(c.op != "broadcast" for c in calls):
        evidence = f"{describe_calls(calls)} to start equal; expected {state_bytes(model)} bytes by broadcast"
        hint = "Hint: every parameter and every buffer, each once."
        raise Wrong({rank: f"{awkward.said(model)}: {evidence}"}, hint)


def judge_gradient_bytes(
    rank: int, calls: list[instrumentation.Call], model: str, most_messages: int | None = None
) -> None:
    """most_messages: how many are allowed; by default one per trainable parameter.

    Raises: Wrong unless the all-reduces carry exactly the trainable parameters' bytes.
    """
    want_bytes = trainable_bytes(model)
    most = most_messages or sum(p.requires_grad for p in awkward.build(model, 0).parameters())
    expected = f"at most {most} messages, {want_bytes} bytes, all by all_reduce"
    message = f"{awkward.said(model)}: {describe_calls(calls)}; expected {expected}"
    if sum(call.payload_bytes for call in calls) != want_bytes or len(calls) > most:
        raise Wrong({rank: message}, "Hint: is each trainable parameter's gradient sent once, and nothing else?")
    if any(not call.op.startswith("all_reduce") for call in calls):
        raise Wrong({rank: message}, "Hint: which single collective leaves the sum on every rank?")


def refuse_early_messages(rank: int, calls: list[instrumentation.Call], model: str) -> None:
    """Raises: Wrong where anything was sent during forward and backward."""
    if calls:
        early = f"{describe_calls(calls)} during forward and backward; expected none"
        hint = "Hint: what may wait until finish_gradient_sync?"
        raise Wrong({rank: f"{awkward.said(model)}: {early}"}, hint)
