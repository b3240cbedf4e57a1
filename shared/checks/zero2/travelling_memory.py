"""What two buckets hold, one launched before the other: what has arrived is let go of, but for this rank's part."""

import time

import torch

from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.deadlines import scaled

SLACK = 1.02  # fillings
_SETTLES_WITHIN_S = scaled(0.5)  # gloo's threads let go of a message's tensor a little after it is done
PACKED, SECOND, ARRIVED = "when all is packed", "when the second is launched", "when both have arrived"
_HINTS = {
    PACKED: "Look at: once a gradient is in the flat tensor, who still holds it? And when are flat tensors made?",
    SECOND: "Look at: what does wait() let go of, and who else holds it? And when is it made?",
    ARRIVED: "Look at: is what stays memory of its own, or a view of something larger?",
}


def probe_memory(travelling, most_bytes: dict[str, float], seed: int, x, y) -> dict[str, int]:
    """Send the gradients of a model in two halves. → by the moment: bytes that have come since it was laid out"""
    FlatParameters = earlier_piece("zero1", "FlatParameters")  # noqa: N806 - a class
    module = awkward.build("Large", seed, torch.float32).to(device_here())
    parameters, found = list(module.parameters()), {}
    middle = len(parameters) // 2
    homes = [FlatParameters(parameters[middle:]), FlatParameters(parameters[:middle])]
    x, y = x.to(device_here(), torch.float32), y.to(device_here(), torch.float32)
    before_bytes = living_bytes()

    def note(when: str) -> None:
        began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
        while held_bytes > most_bytes[when] and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
            time.sleep(0.01)
            held_bytes = min(held_bytes, living_bytes() - before_bytes)
        found[when] = held_bytes

    first, second = (travelling(home) for home in homes)
    second.before = first
    awkward.loss_of(module, x, y).backward()
    for bucket, home in ((first, homes[0]), (second, homes[1])):
        for place in range(len(home.parameters)):
            bucket.pack(place)
        if bucket is second:
            note(PACKED)
        bucket.launch()
    note(SECOND)
    for bucket in (first, second):
        bucket.wait()
    note(ARRIVED)
    return found


def nothing_but_a_part_stays(attempt: Attempt) -> None:
    """Of the second half, what arrives may have as much room as the whole: an all-to-all has."""
    sizes = [p.nbytes for p in awkward.build("Large", 0, torch.float32).parameters()]
    size, first, second = attempt.world_size, sum(sizes[len(sizes) // 2 :]), sum(sizes[: len(sizes) // 2])
    expected = {
        PACKED: second + 2 * first,  # the first is under way
        SECOND: first / size + 2 * second,
        ARRIVED: (first + second) / size,
    }
    most = {when: SLACK * nbytes for when, nbytes in expected.items()}
    for rank, found in enumerate(attempt.run(probe_memory, most, per_rank=Draw(attempt).per_rank)):
        for when, held_bytes in found.items():
            if held_bytes > most[when]:
                said = f"two buckets of {first:,} and {second:,} bytes: {when}, gradients and flat tensors hold"
                raise Wrong({rank: f"{said} {held_bytes:,} bytes; expected {expected[when]:,.0f}"}, _HINTS[when])
