"""Compute which gradients belong in which bucket, and check the messages of a step against that.

Trainable parameters are assigned in reverse order. Each goes into the bucket that was opened last for its dtype and
device or, if it does not fit, into a new one. Buckets are launched in the order in which they were opened.
"""

from dataclasses import dataclass

import torch
from torch import nn

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.models import awkward
from shared.wire import instrumentation

MB = 2**20
FIRST_BUCKET_MB = 1.0
HINT_ON_ORDER = "Hint: which gradients does backward() complete first?"
HINT_ON_CAP = "Hint: if a parameter does not fit into the open bucket, which bucket does it go into?"


@dataclass(frozen=True)
class Message:
    """A bucket as it is sent."""

    dtype: str
    nbytes: int


def plan(parameters, bucket_cap_mb: float = 25.0, first_bucket_mb: float = FIRST_BUCKET_MB) -> list[list[nn.Parameter]]:
    """Split trainable parameters into buckets, in the order in which they are opened."""
    buckets: list[list[nn.Parameter]] = []
    opened: dict[tuple, list[int]] = {}  # by dtype and device, the indices of its buckets
    for parameter in list(parameters)[::-1]:
        if not parameter.requires_grad:
            continue
        indices = opened.setdefault((parameter.dtype, parameter.device), [])
        cap = MB * (bucket_cap_mb if len(indices) > 1 else min(first_bucket_mb, bucket_cap_mb))
        if not indices or bytes_of(buckets[indices[-1]]) + parameter.nbytes > cap:
            indices.append(len(buckets))
            buckets.append([])
        buckets[indices[-1]].append(parameter)
    return buckets


def bytes_of(bucket: list[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in bucket)


def messages_of(model: str, bucket_cap_mb: float = 25.0, dtype: torch.dtype = torch.float64) -> list[Message]:
    """Return the messages that a wrapper of this model sends in a step, in order."""
    buckets = plan(awkward.build(model, 0, dtype).parameters(), bucket_cap_mb)
    return [Message(str(bucket[0].dtype).removeprefix("torch."), bytes_of(bucket)) for bucket in buckets]


def judge_messages(rank: int, calls: list[instrumentation.Call], expected: list[Message], context: str) -> None:
    """Check that the calls are one all-reduce per bucket, in order, each with the bucket's dtype and bytes.

    Args:
        expected: The messages of the buckets.
        context: What was tried: a model and a cap.

    Raises:
        Wrong: If they are not.
    """
    found = [Message(call.dtype, call.payload_bytes) for call in calls]
    other = sorted({call.op for call in calls} - {"all_reduce"})
    if found == expected and not other:
        return
    evidence = (
        f"{context}: {describe_messages(calls)}; expected {len(expected)} all_reduce, of {_sizes(expected)} bytes"
    )
    raise Wrong({rank: evidence}, _cause(found, expected, other))


def describe_messages(calls: list[instrumentation.Call]) -> str:
    """Summarize calls, with their sizes if there are few: `3 messages (all_reduce), of 24, 96 and 8 bytes`."""
    if not 0 < len(calls) < 9:
        return describe_calls(calls)
    sizes = _sizes([Message(call.dtype, call.payload_bytes) for call in calls])
    return f"{describe_calls(calls).rsplit(',', 1)[0]}, of {sizes} bytes"


def describe_cap(model: str, bucket_cap_mb: float | None = None) -> str:
    """Describe a model and a cap to a student."""
    cap = "the default cap" if bucket_cap_mb is None else f"bucket_cap_mb={f'{bucket_cap_mb:f}'.rstrip('0')}"
    return f"{awkward.describe(model)}, {cap}" + (
        "" if bucket_cap_mb is None else f" ({bucket_cap_mb * MB:,.0f} bytes)"
    )


def _sizes(messages: list[Message]) -> str:
    """List the sizes of messages, with their dtypes if there are several."""
    several = len({message.dtype for message in messages}) > 1
    texts = [f"{each.nbytes:,}" + (f" ({each.dtype})" if several else "") for each in messages]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _cause(found: list[Message], expected: list[Message], other: list[str]) -> str:
    """Recognize common mistakes from the number, order, dtype and size of the messages."""
    total, expected_total = sum(each.nbytes for each in found), sum(each.nbytes for each in expected)
    if other:
        return "Hint: which single collective gives every rank the sum?"
    if not found:
        return "Hint: what does finish_gradient_sync() launch?"
    if {each.dtype for each in found} != {each.dtype for each in expected}:
        return "Hint: in which dtype is each gradient sent, and can one flat tensor hold two dtypes?"
    if sorted(found, key=repr) == sorted(2 * expected, key=repr):
        return "Each all-reduce runs twice. Hint: what launches it a second time?"
    if total > expected_total:
        return "Hint: is each trainable parameter in exactly one bucket, and does a bucket hold anything else?"
    if total < expected_total:
        if found == expected[: len(found)]:
            return "The first all-reduces are right. Hint: what happens to the last bucket if it is not full?"
        return "Hint: which parameters are in no bucket?"
    if sorted(found, key=repr) == sorted(expected, key=repr):
        return "The sizes are right, but their order is not. Hint: in which order are buckets opened and launched?"
    if len(found) == 1:
        return "Hint: what does bucket_cap_mb do? And how large may the first bucket be?"
    if len(found) > len(expected):
        return "Hint: how many gradients does one all-reduce send, and when is a new bucket opened?"
    if max(each.nbytes for each in found) > max(each.nbytes for each in expected) or len(found) < len(expected):
        return f"{HINT_ON_CAP} And how large may the first bucket be?"
    return HINT_ON_ORDER
