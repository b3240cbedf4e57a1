"""Check what a wrapper sends: the state once when it is built, and each trainable gradient once per step."""

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.models import awkward
from shared.wire import instrumentation


def trainable_bytes(model: str) -> int:
    return sum(p.nbytes for p in awkward.build(model, 0).parameters() if p.requires_grad)


def state_bytes(model: str) -> int:
    module = awkward.build(model, 0)
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


def judge_state_bytes(rank: int, calls: list[instrumentation.Call], model: str) -> None:
    """Check that every parameter and buffer was broadcast once.

    Raises:
        Wrong: If it was not.
    """
    if sum(call.payload_bytes for call in calls) != state_bytes(model) or any(c.op != "broadcast" for c in calls):
        evidence = (
            f"to give all ranks the same state, {describe_calls(calls)}; "
            f"expected {state_bytes(model)} bytes in broadcasts"
        )
        hint = "Hint: is every parameter and every buffer broadcast exactly once?"
        raise Wrong({rank: f"{awkward.describe(model)}: {evidence}"}, hint)


def judge_gradient_bytes(
    rank: int, calls: list[instrumentation.Call], model: str, most_messages: int | None = None, note: str = ""
) -> None:
    """Check that all-reduces send exactly the bytes of the trainable parameters' gradients.

    Args:
        rank: The rank.
        calls: What it sent.
        model: The name of the model.
        most_messages: The number of messages allowed; by default one per trainable parameter.
        note: What else to say about the model.

    Raises:
        Wrong: If it was not.
    """
    want_bytes = trainable_bytes(model)
    most = most_messages or sum(p.requires_grad for p in awkward.build(model, 0).parameters())
    expected = f"at most {most} messages, {want_bytes} bytes, all by all_reduce"
    message = f"{' '.join(filter(None, [awkward.describe(model), note]))}: {describe_calls(calls)}; expected {expected}"
    if sum(call.payload_bytes for call in calls) != want_bytes or len(calls) > most:
        raise Wrong({rank: message}, "Hint: is the gradient of each trainable parameter sent once, and nothing else?")
    if any(not call.op.startswith("all_reduce") for call in calls):
        raise Wrong({rank: message}, "Hint: which single collective gives every rank the sum?")


def reject_early_messages(rank: int, calls: list[instrumentation.Call], model: str) -> None:
    """Check that nothing was sent during forward and backward.

    Raises:
        Wrong: If anything was.
    """
    if calls:
        early = f"{describe_calls(calls)} during forward and backward; expected none"
        hint = "Hint: what can wait until finish_gradient_sync()?"
        raise Wrong({rank: f"{awkward.describe(model)}: {early}"}, hint)
