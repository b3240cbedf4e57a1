"""Time collectives over a range of sizes, fit α and β to what was measured, and show how loopback misleads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shared.measure.fitting import Fit, fit
from shared.measure.links import DEFAULT_LATENCY_MS, DEFAULT_RATE, behind_link, where
from shared.measure.rounds import ROUNDS, WARM_UP_ROUNDS, Job, Times, in_ms, jobs
from shared.tables import ShowsTable, Table

FLOAT32_BYTES = 4
# The smallest size is 100 elements, because gloo sends nothing for an empty chunk: on four ranks, an all-reduce of one
# element is a different operation than one of four elements.
SIZES_BYTES = (400, 4_000, 40_000, 400_000, 4_000_000)


@dataclass(frozen=True, repr=False)
class Sweep(ShowsTable):
    """The times of several collectives, by name and by the size of the tensor in bytes."""

    times: dict[str, dict[int, Times]]
    ranks: int
    where: str

    def __getitem__(self, name: str) -> dict[int, Times]:
        return self.times[name]

    @property
    def sizes_bytes(self) -> list[int]:
        return list(next(iter(self.times.values())))

    @property
    def measured_s(self) -> dict[str, dict[int, float]]:
        """The estimates, as `plots.costs` takes them."""
        return {name: {size: times.time_s for size, times in of.items()} for name, of in self.times.items()}

    @property
    def measured_ms(self) -> dict[str, list[float]]:
        """The estimates, in the order of `sizes_bytes`, as `plots.message_cost` takes them."""
        return {name: [times.time_ms for times in of.values()] for name, of in self.times.items()}

    def ratio(self, name: str, other: str) -> dict[int, float]:
        """Return, for each size, the time of one collective divided by the time of another."""
        measured_s = self.measured_s
        return {size: measured_s[name][size] / measured_s[other][size] for size in self.sizes_bytes}

    def fit(self, name: str, sends: str = "message") -> Fit:
        """Fit α and β to the times of one collective.

        Args:
            sends: What the collective does: "message" (one message of the whole tensor), "ring reduce-scatter", "ring
                all-gather" or "ring all-reduce".
        """
        steps = {"message": 1, "ring reduce-scatter": self.ranks - 1, "ring all-gather": self.ranks - 1}
        steps["ring all-reduce"] = 2 * (self.ranks - 1)
        if sends not in steps:
            raise ValueError(f"sends must be one of {', '.join(map(repr, steps))}, got {sends!r}")
        pieces = 1 if sends == "message" else self.ranks
        return fit(self.times[name], steps=steps[sends], pieces=pieces, where=self.where)

    def table(self) -> Table:
        rows = [[f"{size:,}", *(in_ms(of[size].time_s) for of in self.times.values())] for size in self.sizes_bytes]
        note = f"{self.ranks} ranks, {self.where}"
        return Table(["bytes", *(f"{name}, ms" for name in self.times)], rows, note)


def collectives(
    calls: Mapping[str, Callable[[torch.Tensor], object]],
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    *,
    repeats: int = 1,
    rounds: int = ROUNDS,
    warm_up_rounds: int = WARM_UP_ROUNDS,
) -> Sweep:
    """Time collectives over a range of sizes. Runs on all ranks together, and returns the same on each.

    Args:
        calls: Functions of a float32 tensor on the rank's device, by name.
        repeats: How many calls in a row one round times. The result is the time of one call. With calls in a row, the
            ranks stay in step without a barrier, as in the steps of a ring.

    Raises:
        ValueError: If a size is not a positive multiple of 4 bytes.
    """
    from shared.ranks import rankside  # needs IPython, which only the ranks have loaded

    odd = [size for size in sizes_bytes if size <= 0 or size % FLOAT32_BYTES]
    if odd or not sizes_bytes:
        raise ValueError(f"sizes_bytes must be positive multiples of {FLOAT32_BYTES}, got {odd or 'none'}")
    tensors = {size: torch.zeros(size // FLOAT32_BYTES, device=rankside.here.device) for size in sizes_bytes}
    to_time = {
        (name, size): Job({name: partial(_repeat, call, tensor, repeats)})
        for name, call in calls.items()
        for size, tensor in tensors.items()
    }
    measured = jobs(to_time, rounds=rounds, warm_up_rounds=warm_up_rounds)
    times = {name: {size: measured[name, size].divided_by(repeats) for size in tensors} for name in calls}
    return Sweep(times, measured.ranks, measured.where)


def _repeat(call: Callable[[torch.Tensor], object], tensor: torch.Tensor, repeats: int) -> None:
    for _ in range(repeats):
        call(tensor)


def loopback_and_link(
    calls: Mapping[str, Callable[[torch.Tensor], object]],
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    rate: str = DEFAULT_RATE,
    latency_ms: float = DEFAULT_LATENCY_MS,
    **options,
) -> dict[str, Sweep]:
    """Time the same collectives over loopback and behind an emulated link, to show how loopback misleads.

    Over loopback, there are no links, only memory and cores that all ranks share. Every byte then costs the same, no
    matter which rank sends it. Behind links, the rank that sends most sets the pace. So a star, in which rank 0 sends
    and receives everything, may be as fast as a ring over loopback, but it is several times slower behind links.

    Run this on all ranks together, on ranks without a link. It returns the same on each.

    Args:
        options: Those of `collectives`.

    Returns:
        Two sweeps, "loopback" and "link".

    Raises:
        ValueError: If the ranks are behind a link already, or use NCCL.
    """
    if "loopback" not in where():
        raise ValueError(f"these ranks measure {where()}: start them with backend='gloo:cpu' and without a link")
    loopback = collectives(calls, sizes_bytes, **options)
    with behind_link(rate, latency_ms):
        return {"loopback": loopback, "link": collectives(calls, sizes_bytes, **options)}
