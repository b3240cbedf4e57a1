"""Judge how much memory a rank holds with ZeRO2: at rest, between backward and step, and during backward."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import MB
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import expect
from shared.checks.engine.overlap_models import Chain
from shared.checks.engine.sharded.held import SLACK, Expected, Held, Observer, judge_held
from shared.checks.models import awkward

LAYERS, WIDTH, SAMPLES = 48, 64, 2
WIDTHS = (awkward.INPUTS, *[WIDTH] * LAYERS, awkward.OUTPUTS)
NUMEL = sum((before + 1) * after for before, after in pairwise(WIDTHS))
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH
CAP_BYTES = 4 * LAYER_BYTES
TRIES = 3  # gloo's threads release a message late, so a peak that is too high is measured again, and the lowest counts
REST, REDUCED = "after zero_grad() without a step", "after finish_gradient_sync()"
_HINTS = {
    "gradients": "Hint: which gradients still exist after zero_grad(), and is any of them needed?",
    REDUCED: "Hint: what remains of a bucket after wait(), and is it a view of a larger tensor?",
}


class _Training:
    """A ZeRO2 with Adam on this rank."""

    def __init__(self, zero2, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(SAMPLES, awkward.INPUTS, generator=draw).to(device_here())
        self.y = torch.randn(SAMPLES, awkward.OUTPUTS, generator=draw).to(device_here())
        self.wrapped = zero2(Chain(WIDTHS).to(device_here()), torch.optim.Adam, bucket_cap_mb=CAP_BYTES / MB, lr=0.01)

    def backward(self) -> None:
        nn.functional.mse_loss(self.wrapped(self.x), self.y).backward()
        self.wrapped.finish_gradient_sync()

    def step(self) -> None:
        self.wrapped.step()
        self.wrapped.zero_grad()


def probe_memory(zero2, most_bytes: dict[str, float], seed: int) -> Held:
    """Train, and return the bytes held at each moment, and by component."""
    observer = Observer(most_bytes)
    training = _Training(zero2, seed)
    for _ in range(2):
        training.backward()
        training.step()
    training.backward()
    observer.note(REDUCED)
    training.wrapped.zero_grad()  # without a step, which would drop the shards' gradients, too
    observer.note(REST)
    return observer.report(training.wrapped, training.wrapped)


def each_rank_holds_its_shards(attempt: Attempt) -> None:
    state, size = 8 * NUMEL / attempt.world_size, attempt.world_size
    rest = 4 * NUMEL + state
    expected = Expected({REST: rest, REDUCED: rest + 4 * NUMEL / size}, state, least=rest, hints=_HINTS)
    found = attempt.run(probe_memory, expected.moments, per_rank=_seeds(attempt))
    judge_held(dict(enumerate(found)), expected, f"{NUMEL:,} float32 parameters, Adam, {size} ranks")


@dataclass
class Peaks:
    grown_bytes: list[int]  # by how many bytes each backward has grown at its peak
    links: str  # what is wrong with how the buckets are linked, or ""


def probe_peaks(zero2, seed: int) -> Peaks:
    """Train two steps, and watch how much memory each backward needs."""
    training, peaks = _Training(zero2, seed), []
    for _ in range(2):
        with memory.peak(training.wrapped, training.wrapped) as peak:
            training.backward()
        grown = [sample.held.total_bytes - sample.held.activations_bytes for sample in peak.samples]
        peaks.append(max(grown) - grown[0])
        links = _links_of(training.wrapped)
        training.step()
    return Peaks(peaks, links)


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


def backward_holds_three_buckets(attempt: Attempt) -> None:
    """Allow, besides the shards, the bucket in flight, its receive buffer, the bucket being packed and one gradient."""
    size, peaks = attempt.world_size, [float("inf")] * attempt.world_size
    most = SLACK * (4 * NUMEL / size + 3 * CAP_BYTES + LAYER_BYTES)
    for _ in range(TRIES):
        found = attempt.run(probe_peaks, per_rank=_seeds(attempt))
        peaks = [min(least, *each.grown_bytes) for least, each in zip(peaks, found, strict=True)]
        if max(peaks) <= most:
            return
    for rank, peak_bytes in enumerate(peaks):
        links = found[rank].links
        evidence = (
            f"{-(-4 * NUMEL // CAP_BYTES)} buckets of {CAP_BYTES:,} bytes on {size} ranks: at its peak, backward holds "
            f"{peak_bytes:,} bytes more than before it; expected at most {most / SLACK:,.0f}: {4 * NUMEL // size:,} "
            f"for this rank's shards of the gradients, {3 * CAP_BYTES:,} for three buckets, and {LAYER_BYTES:,} for "
            f"one gradient{f'. {links}' if links else ''}"
        )
        hint = "Hint: which gradients and flat tensors are alive then, and what is each of them waiting for?"
        hint = "Hint: which bucket is launched before this one?" if links else hint
        expect({rank: peak_bytes}, lambda nbytes: nbytes <= most, evidence, hint)
