"""What a wrapper costs besides time: the bytes that it sends, and those that it holds.

It sends the state once when it is built, and each trainable gradient once per step. A second copy of the gradients is
noticed, because every tensor that Python can reach is counted, whichever attribute, closure or list refers to it.
"""

import gc
import sys
import time
from array import array
from mmap import mmap

import numpy as np
import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.training import Draw, descend
from shared.checks.models import awkward
from shared.deadlines import scaled
from shared.wire import instrumentation

_SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads release the tensor of a message shortly after it completes
LEAST_HIDDEN_BYTES = 4096  # smaller arrays are ignored, because every program has many of them
PADDING_BYTES = 64  # per parameter, because some implementations align each gradient


def probe_footprint(wrapper, model: str, options: dict, least_bytes: int, seed: int, x, y) -> int:
    """Train three steps. Returns the bytes that are held besides the module."""
    module = awkward.build(model, seed).to(device_here())
    x, y = x.to(device_here()), y.to(device_here())
    before_bytes = living_bytes()
    wrapped = wrapper(module, **options)
    for step in range(3):
        if step:
            descend(module.parameters())
            module.zero_grad()
        awkward.loss_of(wrapped, x, y).backward()
        wrapped.finish_gradient_sync()
    return settled_bytes(least_bytes, before_bytes)


def living_bytes() -> int:
    """Add up the bytes of all storages on this rank's device, each counted once."""
    instrumentation.synchronize()
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device == device_here() and thing.layout is torch.strided:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values()) - instrumentation.simulated_bytes()


def ignore_existing_objects() -> None:
    """Exclude all objects that already exist from later counts.

    The ranks' server has already frozen everything that it imported. A count of those objects would take a second.
    """
    gc.collect()
    gc.freeze()


def hidden_bytes() -> int:
    """Add up the bytes of objects that may hold elements without being tensors, such as arrays, strings and lists.

    Call ignore_existing_objects() before the tensors of interest are allocated.
    """
    here = gc.get_objects()
    seen = {each.untyped_storage()._cdata for each in here if issubclass(type(each), torch.Tensor)}
    things = {id(thing): thing for thing in gc.get_referents(*here)}.values()
    arrays = [thing.nbytes for thing in things if isinstance(thing, np.ndarray) and thing.base is None]
    raw = [memoryview(thing).nbytes for thing in things if isinstance(thing, bytes | bytearray | array | mmap)]
    raw += [sys.getsizeof(thing) for thing in things if type(thing) in (str, int) or _is_number_list(thing)]
    storages = [each.nbytes() for each in things if type(each) is torch.UntypedStorage and each._cdata not in seen]
    return sum(each for each in arrays + raw + storages if each > LEAST_HIDDEN_BYTES)


def _is_number_list(value) -> bool:
    """Return whether a value is a vector as a list of numbers. In other lists, checks keep their records."""
    return type(value) in (list, tuple) and len(value) > 0 and type(value[0]) in (float, int)


def settled_bytes(most_bytes: float, before_bytes: int) -> int:
    """Return the bytes of tensors that did not exist before, after a short wait if they are more than expected."""
    began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
    while held_bytes > most_bytes and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
        time.sleep(0.01)
        held_bytes = min(held_bytes, living_bytes() - before_bytes)
    return held_bytes


def judge_footprint(attempt: Attempt, model: str, options: dict, context: str) -> None:
    """Check that only one copy of the gradients is held from step to step.

    Raises:
        Wrong: If a rank holds more bytes.
    """
    draw, one_copy = Draw(attempt), trainable_bytes(model)
    most = one_copy + PADDING_BYTES * len(list(awkward.build(model, 0).parameters()))
    found = attempt.run(probe_footprint, model, options, most, per_rank=draw.per_rank)
    wrong = {
        rank: f"{context}: after three steps, gradients and buckets hold {held_bytes:,} bytes; "
        f"expected {one_copy:,} bytes, the size of the gradients"
        for rank, held_bytes in enumerate(found)
        if held_bytes > most
    }
    if wrong:
        raise Wrong(
            wrong, "Hint: do you copy the result out of the bucket? And is the bucket still in memory after that?"
        )


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


def judge_gradient_bytes(rank: int, calls: list[instrumentation.Call], model: str, note: str = "") -> None:
    """Check that all-reduces send exactly the bytes of the trainable parameters' gradients, in one message for each.

    Args:
        model: The name of the model.
        note: What else to say about the model.

    Raises:
        Wrong: If it was not.
    """
    want_bytes = trainable_bytes(model)
    most = sum(p.requires_grad for p in awkward.build(model, 0).parameters())
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
