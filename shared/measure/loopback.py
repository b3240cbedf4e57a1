"""Show how loopback misleads: the same collectives without links, and behind them."""

from collections.abc import Callable, Mapping, Sequence

import torch

from shared.measure.links import DEFAULT_LATENCY_MS, DEFAULT_RATE, behind_link, where
from shared.measure.sweeps import SIZES_BYTES, Sweep, collectives


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
