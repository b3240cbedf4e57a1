"""The five steps that lead from a job and a cluster to a few layouts worth measuring, with the planner's numbers.

guide(search(Job(SHAPES["Llama-2 70B"], sequences=256), a100_hosts(4)))
"""

from collections.abc import Iterable, Mapping

from shared.planner.layouts import TrainingLayout
from shared.planner.search import GB, TIE, Candidate, Found
from shared.tables import Table

LEAST_ACTIVATIONS_GB = 10  # without them, step 1 would let state alone fill a GPU


def guide(found: Found) -> Table:
    """Walk through the five steps: one row per step, with what it computes and what follows from it."""
    cluster, job = found.cluster, found.job
    state_gb = 16 * job.shape.parameters / cluster.gpus / GB
    usable_gb = found.usable_bytes / GB
    fits = state_gb + LEAST_ACTIVATIONS_GB <= usable_gb
    verdict = f"{state_gb:.0f} + {LEAST_ACTIVATIONS_GB} GB of {usable_gb:.0f}"
    rows = [["1. Does it fit?", verdict, "yes" if fits else "no: more GPUs, or offload state"]]
    if found.best is None:
        return Table(["step", "the planner computes", "so"], rows)
    most = min(job.sequences, cluster.gpus)
    rows += [
        ["2. Is the batch large enough?", f"{job.sequences} sequences for {cluster.gpus} GPUs", f"DP up to {most}"],
        ["3. How much TP?", _seconds(_of_each_tp(found)), f"TP {found.best.layout.tp}"],
        ["4. Pipeline or ZeRO?", _seconds(_with(found, "pp")), _told_apart(_with(found, "pp").values())],
        ["5. Measure", f"all within {TIE:.0%} of the fastest", f"{len(found.tied())} divisions of the GPUs"],
    ]
    return Table(["step", "the planner computes", "so"], rows, "Seconds per step of the fastest layout that fits.")


def _of_each_tp(found: Found) -> dict[str, Candidate | None]:
    """Return the fastest layout that fits for each tp up to a host."""
    sizes = [1 << power for power in range(found.cluster.gpus_per_host.bit_length())]
    return {f"TP {tp}": found.best_of(lambda layout, tp=tp: layout.tp == tp) for tp in sizes}


def _with(found: Found, axis: str) -> dict[str, Candidate]:
    """Return the fastest layout that fits for each size of an axis, with the best layout's tp."""

    def kind(layout: TrainingLayout) -> int | None:
        return getattr(layout, axis) if layout.tp == found.fastest.layout.tp else None

    kinds = {kind(each.layout) for each in found.candidates}
    sizes = sorted(size for size in kinds if size is not None)
    best = {size: found.best_of(lambda layout, size=size: kind(layout) == size) for size in sizes}
    return {_name(each): each for each in best.values() if each}


def _name(candidate: Candidate) -> str:
    layout = candidate.layout
    zero = f" with {layout.options[0]}" if layout.replicas > 1 else ""
    return f"PP {layout.pp}{zero}"


def _seconds(candidates: Mapping[str, Candidate | None]) -> str:
    texts = [f"{name}: {each.time.total_s:.3g} s" if each else f"{name}: –" for name, each in candidates.items()]
    return ", ".join(texts)


def _told_apart(candidates: Iterable[Candidate]) -> str:
    steps = [each.time.total_s for each in candidates]
    tied = sum(step <= (1 + TIE) * min(steps) for step in steps)
    return "a tie" if tied == len(steps) else f"a tie of {tied}"
