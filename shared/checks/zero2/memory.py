"""Judge how much memory a rank holds with ZeRO2: at rest, between backward and step, and during backward.

There are three counts, because each sees something that the others miss. Between calls, the first adds up every tensor
that lives on this rank, in whichever attribute, closure or list it is kept. The second finds objects that are not
tensors but may hold the values of one. During backward, the third follows every storage that an operator allocates.
"""

import contextlib
import time
from itertools import pairwise

import torch
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import MB
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import hidden_bytes, ignore_existing_objects, living_bytes
from shared.checks.engine.overlap_models import Chain
from shared.checks.models import awkward
from shared.deadlines import scaled

LAYERS, WIDTH, SAMPLES = 48, 64, 2
WIDTHS = (awkward.INPUTS, *[WIDTH] * LAYERS, awkward.OUTPUTS)
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH
CAP_BYTES = 4 * LAYER_BYTES
SLACK = 1.01  # padding, Adam's step counters, inputs
_SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads release a message's tensor a little after the message is complete
TRIES = 3  # for that reason, a peak that is too high is measured again, and the lowest one counts
REST, REDUCED = "after zero_grad() without a step", "after finish_gradient_sync()"


def numel() -> int:
    return sum((before + 1) * after for before, after in pairwise(WIDTHS))


def probe_memory(zero2, most_bytes: dict[str, float] | None, seed: int) -> dict:
    """Train with Adam. Return the bytes held at each moment, and by component.

    Args:
        zero2: The student's class.
        most_bytes: The limit at each moment, or None to measure the additional bytes at each backward's peak instead.
        seed: For the samples.
    """
    ignore_existing_objects()
    return _train(zero2, most_bytes, seed)


def _train(zero2, most_bytes: dict[str, float] | None, seed: int) -> dict:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, awkward.INPUTS, generator=draw).to(device_here())
    y = torch.randn(SAMPLES, awkward.OUTPUTS, generator=draw).to(device_here())
    before_bytes, found = living_bytes(), {"held": {}, "peaks": []}
    module = Chain(WIDTHS).to(device_here())
    wrapped = zero2(module, torch.optim.Adam, bucket_cap_mb=CAP_BYTES / MB, lr=0.01)

    def note(when: str) -> None:
        began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
        while held_bytes > most_bytes[when] and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
            time.sleep(0.01)
            held_bytes = min(held_bytes, living_bytes() - before_bytes)
        found["held"][when] = held_bytes

    def backward() -> None:
        nn.functional.mse_loss(wrapped(x), y).backward()
        wrapped.finish_gradient_sync()

    for _ in range(2):
        with memory.peak(wrapped, wrapped) if most_bytes is None else contextlib.nullcontext() as peak:
            backward()
        if most_bytes is None:
            grown = [sample.held.total_bytes - sample.held.activations_bytes for sample in peak.samples]
            found["peaks"].append(max(grown) - grown[0])
            found["links"] = _links_of(wrapped)
        wrapped.step()
        wrapped.zero_grad()
    if most_bytes is None:
        return found
    backward()
    note(REDUCED)
    wrapped.zero_grad()  # without a step, which would drop the shards' gradients, too
    note(REST)
    found |= {"components": memory.held(wrapped, wrapped).by_component(), "hidden": hidden_bytes()}
    return found


def _links_of(wrapped) -> str:
    """Describe the first bucket whose `previous` is not the bucket before it in `buckets`, or return ""."""
    buckets = list(getattr(wrapped, "buckets", []))
    index_of = {id(bucket): f"buckets[{index}]" for index, bucket in enumerate(buckets)} | {id(None): "None"}
    for index, bucket in enumerate(buckets):
        found = getattr(bucket, "previous", None)
        if found is not (buckets[index - 1] if index else None):
            expected = f"buckets[{index - 1}]" if index else "None"
            return f"buckets[{index}].previous is {index_of.get(id(found), 'another object')}; expected {expected}"
    return ""


def _seeds(attempt: Attempt) -> list[tuple[int]]:
    return [(attempt.draw_seed(),) for _ in range(attempt.world_size)]


def each_rank_holds_its_shards(attempt: Attempt) -> None:
    rest = numel() * (4 + 8 / attempt.world_size)
    expected = {REST: rest, REDUCED: rest + 4 * numel() / attempt.world_size}
    most = {when: SLACK * nbytes for when, nbytes in expected.items()}
    found = attempt.run(probe_memory, most, per_rank=_seeds(attempt))
    context = f"{numel():,} float32 parameters, Adam, {attempt.world_size} ranks"
    for rank, result in enumerate(found):
        state_bytes = 8 * numel() / attempt.world_size
        named = ", ".join(f"{name} {held:,}" for name, held in result["components"].items() if held)
        if result["components"]["optimizer"] > SLACK * state_bytes:
            evidence = f"the optimizer holds {result['components']['optimizer']:,} bytes; expected {state_bytes:,.0f}"
            raise Wrong({rank: f"{context}: {evidence}"}, "Hint: which parameters does the inner optimizer get?")
        for when in (REST, REDUCED):
            if (held_bytes := result["held"][when]) > most[when]:
                evidence = f"{when}, {held_bytes:,} bytes are held; expected at most {expected[when]:,.0f}"
                raise Wrong({rank: f"{context}: {evidence}. At rest, by component: {named}"}, _why(when, result))
        if result["hidden"] > (SLACK - 1) * expected[REST]:
            evidence = (
                f"{result['hidden']:,} bytes are in NumPy arrays, bytes objects or storages rather than "
                "tensors; expected none"
            )
            raise Wrong(
                {rank: f"{context}: {evidence}"},
                "Hint: which values do these objects hold, and does this rank need them?",
            )
        if result["held"][REST] < expected[REST] / SLACK:
            evidence = (
                f"{result['held'][REST]:,} bytes are in tensors, but the parameters and this rank's state need "
                f"{expected[REST]:,.0f}"
            )
            raise Wrong({rank: f"{context}: {evidence}"}, "Hint: where is this rank's shard of the optimizer state?")


def _why(when: str, result: dict) -> str:
    if when == REST and result["components"]["gradients"]:
        return "Hint: which gradients still exist after zero_grad(), and is any of them needed?"
    if when == REDUCED:
        return "Hint: what remains of a bucket after wait(), and is it a view of a larger tensor?"
    return "Hint: which tensors exist twice, and what keeps them alive?"


def backward_holds_three_buckets(attempt: Attempt) -> None:
    """Allow, besides the shards, the bucket in flight, its receive buffer, the bucket being packed and one gradient."""
    most = SLACK * (4 * numel() / attempt.world_size + 3 * CAP_BYTES + LAYER_BYTES)
    peaks = [float("inf")] * attempt.world_size
    for _ in range(TRIES):
        found = attempt.run(probe_memory, None, per_rank=_seeds(attempt))
        peaks = [min(least, *each["peaks"]) for least, each in zip(peaks, found, strict=True)]
        if max(peaks) <= most:
            return
    for rank, peak_bytes in enumerate(peaks):
        if peak_bytes > most:
            buckets = -(-4 * numel() // CAP_BYTES)
            shards_bytes = 4 * numel() // attempt.world_size
            evidence = (
                f"{buckets} buckets of {CAP_BYTES:,} bytes on {attempt.world_size} ranks: at its peak, backward holds "
                f"{peak_bytes:,} bytes more than before it; expected at most {most / SLACK:,.0f}: {shards_bytes:,} for "
                f"this rank's shards of the gradients, {3 * CAP_BYTES:,} for three buckets, and {LAYER_BYTES:,} for "
                "one gradient"
            )
            hint = "Hint: which gradients and flat tensors are alive then, and what is each of them waiting for?"
            if links := found[rank]["links"]:
                evidence += f". {links}"
                hint = "Hint: which bucket is launched before this one?"
            raise Wrong({rank: evidence}, hint)
