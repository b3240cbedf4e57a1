"""Judge the memory of two buckets launched one after the other: after wait(), only this rank's shard stays."""

import time

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.sharded.flat_layout import flat_parameter_type_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.deadlines import scaled

SLACK = 1.02  # padding
_SETTLES_WITHIN_S = scaled(0.5)  # gloo's threads release a message's tensor a little after the message is complete
PACKED, SECOND, REDUCED = "when both are packed", "when the second is launched", "when both are reduced"
_HINT_ON_VIEW = "Hint: what does the handle's wait() return, and what does shard.grad need instead?"
_HINTS = {
    PACKED: (
        "Hint: once a gradient is in the flat tensor, what still refers to it? And when are flat tensors allocated?"
    ),
    SECOND: "Hint: which tensor should wait() free, what else refers to it, and when is it allocated?",
    REDUCED: "Hint: does the remaining tensor have memory of its own, or is it a view of a larger one?",
}


def probe_memory(sharded_bucket, most_bytes: dict[str, float], seed: int, x, y) -> tuple[dict[str, int], bool]:
    """Reduce a model's gradients in two halves.

    Returns:
        The bytes that live besides the parameters, by moment, and whether a shard.grad is a view of a larger tensor.
    """
    flat_parameter_type = flat_parameter_type_of(sharded_bucket)
    module = awkward.build("Large", seed, torch.float32).to(device_here())
    parameters, found = list(module.parameters()), {}
    middle = len(parameters) // 2
    halves = [flat_parameter_type(parameters[middle:], None), flat_parameter_type(parameters[:middle], None)]
    x, y = x.to(device_here(), torch.float32), y.to(device_here(), torch.float32)
    before_bytes = living_bytes()

    def note(when: str) -> None:
        began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
        while held_bytes > most_bytes[when] and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
            time.sleep(0.01)
            held_bytes = min(held_bytes, living_bytes() - before_bytes)
        found[when] = held_bytes

    first, second = (sharded_bucket(half) for half in halves)
    second.previous = first
    awkward.loss_of(module, x, y).backward()
    for bucket, half in zip((first, second), halves, strict=True):
        for index in range(len(half.layout.parameters)):
            bucket.pack(index)
        if bucket is second:
            note(PACKED)
        bucket.launch()
    note(SECOND)
    for bucket in (first, second):
        bucket.wait()
    note(REDUCED)
    means = [half.shard.grad for half in halves]
    return found, any(mean is not None and mean.untyped_storage().nbytes() > SLACK * mean.nbytes for mean in means)


def only_a_shard_stays(attempt: Attempt) -> None:
    """Allow the second half a receive buffer as large as the bucket, because an all-to-all needs one."""
    sizes = [p.nbytes for p in awkward.build("Large", 0, torch.float32).parameters()]
    size, first, second = attempt.world_size, sum(sizes[len(sizes) // 2 :]), sum(sizes[: len(sizes) // 2])
    expected = {
        PACKED: second + 2 * first,  # the first is in flight
        SECOND: first / size + 2 * second,
        REDUCED: (first + second) / size,
    }
    most = {when: SLACK * nbytes for when, nbytes in expected.items()}
    for rank, (found, is_view) in enumerate(attempt.run(probe_memory, most, per_rank=Draw(attempt).per_rank)):
        for when, held_bytes in found.items():
            if held_bytes > most[when]:
                context = f"two buckets of {first:,} and {second:,} bytes: {when}, gradients, flat tensors and receive"
                evidence = f"{context} buffers hold {held_bytes:,} bytes; expected at most {expected[when]:,.0f}"
                if is_view and when != PACKED:
                    raise Wrong({rank: f"{evidence}. shard.grad shares memory with the flat tensor"}, _HINT_ON_VIEW)
                raise Wrong({rank: evidence}, _HINTS[when])
