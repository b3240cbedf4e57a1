# Built by `make notebooks` from source/18_3d_parallelism/lab.py: edit that, not this.
"""Layouts of ranks in a mesh: coordinates, the bytes that each axis sends, and the choice of a layout for a cluster.

`sizes` holds the number of ranks along each axis, from the outermost axis to the innermost one, such as
{"dp": 2, "pp": 4, "tp": 8}. Neighboring ranks differ in the innermost coordinate.
"""

import math
from collections.abc import Sequence

from shared import formulas
from shared.planner.layouts import Cluster, Job, TrainingLayout, memory, step_time
from shared.planner.search import TIE, USABLE, possible
from shared.planner.shapes import ModelShape


def coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Return a rank's coordinate on each axis of a mesh."""
    found = {}
    for axis, size in reversed(sizes.items()):
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in sizes}


def ranks_along(axis: str, rank: int, sizes: dict[str, int]) -> list[int]:
    """Return the ranks of the process group that a rank belongs to along an axis, in increasing order."""

    def others(each: int) -> dict[str, int]:
        return coordinates(each, sizes) | {axis: 0}

    world_size = math.prod(sizes.values())
    return [each for each in range(world_size) if others(each) == others(rank)]


def destinations(axis: str, rank: int, sizes: dict[str, int]) -> list[int]:
    """Return to whom a rank sends along an axis: its neighboring stages, or the next rank of a ring."""
    group = ranks_along(axis, rank, sizes)
    index = group.index(rank)
    if axis == "pp":
        return group[max(index - 1, 0) : index] + group[index + 1 : index + 2]
    return [group[(index + 1) % len(group)]] if len(group) > 1 else []


def step_bytes(shape: ModelShape, sizes: dict[str, int], sequences: int) -> dict[str, float]:
    """Estimate what a rank of a middle stage sends in a step along each axis, to each destination."""
    dp, pp, tp = sizes["dp"], sizes["pp"], sizes["tp"]
    tokens, layers = sequences * shape.context / dp, shape.layers / pp
    found = {
        "dp": formulas.all_reduce_sent_bytes(2 * shape.parameters / (pp * tp), dp),
        "pp": 2.0 * tokens * shape.hidden,
        "tp": formulas.tensor_parallel_sent_bytes(tokens, shape.hidden, layers, tp),
    }
    return {axis: found[axis] for axis in sizes}


def leaving_bytes(
    shape: ModelShape, sizes: dict[str, int], sequences: int, ranks_per_host: int, host: int = 0
) -> dict[str, float]:
    """Estimate what leaves a host in a step along each axis."""
    sent_bytes = step_bytes(shape, sizes, sequences)
    own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

    def crossing(axis: str) -> int:
        return sum(to not in own for rank in own for to in destinations(axis, rank, sizes))

    return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}


def bubble_s(busy_s: Sequence[float], message_s: float, layout: TrainingLayout) -> float:
    """Estimate how long the slowest stage of a pipeline waits in a step, while the pipeline fills and drains."""
    waits_s = sum(busy_s) - max(busy_s) + (layout.pp - 1) * message_s
    if layout.schedule == "interleaved":
        return waits_s / layout.chunks
    return waits_s / 3 if layout.schedule == "zero_bubble" else waits_s


def choose_layouts(job: Job, cluster: Cluster) -> list[TrainingLayout]:
    """Return the layouts that fit and that a planner cannot tell from the fastest one, one per dp × pp × tp."""
    fastest: dict[str, tuple[float, TrainingLayout]] = {}
    for layout in possible(job, cluster):
        if memory(job, layout).total_bytes > USABLE * cluster.gpu.memory_bytes:
            continue
        seconds = step_time(job, layout, cluster, bubble_s).total_s
        if layout.sizes not in fastest or seconds < fastest[layout.sizes][0]:
            fastest[layout.sizes] = seconds, layout
    ordered = sorted(fastest.values(), key=lambda pair: pair[0])
    return [layout for seconds, layout in ordered if seconds <= (1 + TIE) * ordered[0][0]]
