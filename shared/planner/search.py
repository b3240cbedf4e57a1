"""Searches all layouts of a job on a cluster for the fastest one that fits, and says why it is that one.

    found = search(Job(SHAPES["Llama-2 70B"], sequences=1024), layouts.a100_hosts(4))
    found.best.layout, found.best.time.total_s, found.why()

The space is dp × pp × tp × ZeRO stage × micro-batch × checkpointing × schedule, and cp × ep on request. The search
tries all of it, because it has only thousands of layouts. `layouts` computes the memory and the time of each one, and
says what that leaves out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from shared import planner
from shared.planner import layouts
from shared.planner.layouts import Cluster, Job, StepTime, TrainingLayout, a100_hosts, h100_hosts
from shared.planner.shapes import SHAPES
from shared.tables import Table

GB = 1e9
USABLE = 0.9  # the part of a GPU's memory that a plan may fill
TIE = 0.2  # The planner's error is so large that it cannot tell two layouts apart whose times differ by less.
MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = ("1f1b", "interleaved")  # those that Megatron-LM has
CHUNKS = (2, 3, 4, 5, 6, 7, 8)
_SAME = 1.001  # two layouts whose times differ by less are equally fast: the simpler one wins

# The name of each situation of lab 18: the job and the cluster. The second one is the lesson's.
SITUATIONS: dict[str, tuple[Job, Cluster]] = {
    "7B on 1 host of 8 H100, 64 sequences": (Job(SHAPES["Llama-2 7B"], 64), h100_hosts(1)),
    "70B on 4 hosts of 8 A100, 256 sequences": (Job(SHAPES["Llama-2 70B"], 256), a100_hosts(4)),
    "70B on 4 hosts of 8 H100 that share one adapter each, 64 sequences": (
        Job(SHAPES["Llama-2 70B"], 64),
        h100_hosts(4, adapters=1),
    ),
}


@dataclass(frozen=True)
class Candidate:
    """A layout, what it needs, and whether that is available."""

    layout: TrainingLayout
    plan: planner.Plan
    time: StepTime
    fits: bool

    @property
    def gb(self) -> float:
        return self.plan.total_bytes / GB


@dataclass(frozen=True)
class Found:
    """All layouts of a job on a cluster."""

    job: Job
    cluster: Cluster
    usable_bytes: float
    candidates: list[Candidate] = field(default_factory=list)

    def candidate(self, layout: TrainingLayout) -> Candidate:
        """Compute what a layout needs, even if the search has not tried it.

        Raises:
            ValueError: If the layout does not divide the model or the batch, or does not use all GPUs.
        """
        plan, time = layouts.memory(self.job, layout), layouts.step_time(self.job, layout, self.cluster)
        return Candidate(layout, plan, time, plan.total_bytes <= self.usable_bytes)

    def verdict(self, candidate: Candidate) -> str:
        """Say in a few words whether a layout fits, and how well it uses the GPUs."""
        utilization = layouts.mfu(self.job, candidate.time.total_s, self.cluster)
        return f"MFU {utilization:.0%}" + ("" if candidate.fits else ", if it fitted")

    @cached_property
    def best(self) -> Candidate | None:
        """Return the fastest layout that fits, or None if none does."""
        return self.best_of(lambda layout: True)

    @property
    def fastest(self) -> Candidate:
        """Return the best layout of a job for which there is one."""
        if self.best is None:
            raise ValueError("no layout fits")
        return self.best

    @property
    def mfu(self) -> float:
        return layouts.mfu(self.job, self.fastest.time.total_s, self.cluster)

    def best_of(self, wanted: Callable[[TrainingLayout], bool]) -> Candidate | None:
        """Return the fastest layout that fits, of those that are wanted. Of equally fast ones, it is the simplest."""
        fitting = [each for each in self.candidates if each.fits and wanted(each.layout)]
        if not fitting:
            return None
        fastest_s = min(each.time.total_s for each in fitting)
        return min((each for each in fitting if each.time.total_s < _SAME * fastest_s), key=_complexity)

    def why(self) -> str:
        """Say what rules out the neighbors of the best layout, each of which differs in one thing, in a line each."""
        if self.best is None:
            least = self.smallest
            return f"Nothing fits: even {least.layout} needs {least.gb:.0f} GB per GPU."
        reasons = [f"- {name} {self.against(other)}" for name, other in self.neighbors().items()]
        return "\n".join([f"{self.best.layout}. With one change:", *reasons])

    @property
    def smallest(self) -> Candidate:
        """Return the layout that needs the least memory."""
        return min(self.candidates, key=lambda each: each.gb)

    def neighbors(self) -> dict[str, Candidate]:
        """Return the possible layouts that differ from the best one in one thing. DP makes up for other sizes."""
        best, gpus = self.fastest.layout, self.cluster.gpus
        changes = {f"TP {tp}": {"tp": tp} for tp in (best.tp // 2, 2 * best.tp)}
        changes |= {f"PP {pp}": {"pp": pp} for pp in (best.pp // 2, 2 * best.pp)}
        for axis in ("cp", "ep"):
            size = getattr(best, axis)
            changes |= {f"{axis.upper()} {other}": {axis: other} for other in (size // 2, 2 * size) if size > 1}
        changes |= {
            f"micro-batch {size}": {"micro_batch": size} for size in (best.micro_batch // 2, 2 * best.micro_batch)
        }
        changes |= {f"checkpointing {how}": {"checkpointing": how} for how in ("none", "full")}
        changes |= {planner.STAGES[stage]: {"zero_stage": stage} for stage in range(4) if best.replicas > 1}
        found = {}
        for name, change in changes.items():
            if any(value in (0, getattr(best, size)) for size, value in change.items() if size != "zero_stage"):
                continue
            layout = replace(best, **change)
            layout = replace(layout, dp=gpus // (layout.tp * layout.pp * layout.cp))
            if layout.pp == 1:
                layout = replace(layout, schedule="1f1b", chunks=1)
            if layout != best and layout.ranks == gpus and _divides(self.job, layout):
                found[name] = self.candidate(layout)
        return found

    def against(self, other: Candidate) -> str:
        """Say what is wrong with another layout: it does not fit, or what makes it slower."""
        if not other.fits:
            return f"needs {other.gb:.0f} GB"
        slower = other.time.total_s / self.fastest.time.total_s - 1
        if abs(slower) < _SAME - 1:
            return "is as fast"
        mine, theirs = self.fastest.time.by_part(), other.time.by_part()
        more_s = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in {**mine, **theirs}}
        grown = max(more_s, key=more_s.__getitem__)
        tie = ", a tie" if slower <= TIE else ""
        return f"is {slower:.0%} slower{tie} ({grown}: {more_s[grown]:+.2g} s)"

    def by_sizes(self) -> list[Candidate]:
        """Return the fastest layout that fits of each division of the GPUs, from the fastest to the slowest."""
        kinds = {each.layout.sizes for each in self.candidates if each.fits}
        fastest = [self.best_of(lambda layout, kind=kind: layout.sizes == kind) for kind in sorted(kinds)]
        return sorted(filter(None, fastest), key=lambda each: each.time.total_s)

    def tied(self) -> list[Candidate]:
        """Return those of by_sizes() that take at most TIE longer than the fastest."""
        ordered = self.by_sizes()
        return [each for each in ordered if each.time.total_s <= (1 + TIE) * ordered[0].time.total_s]

    def table(self, count: int = 5) -> Table:
        """Show the fastest layouts that fit, at most one per division of the GPUs. Ties are shown as ties."""
        rows = []
        for each in self.by_sizes()[:count]:
            utilization = layouts.mfu(self.job, each.time.total_s, self.cluster)
            tie = "a tie" if each.time.total_s <= (1 + TIE) * self.fastest.time.total_s else ""
            rows.append([f"{each.time.total_s:.3g}", tie, f"{utilization:.0%}", f"{each.gb:.0f}", str(each.layout)])
        fitting = sum(each.fits for each in self.candidates)
        note = (
            f"{self.job.shape.name} on {self.cluster.gpus:,} {self.cluster.gpu.name}, {self.job.sequences:,} sequences "
            f"per step: of {len(self.candidates):,} layouts, {fitting:,} fit. {len(self.tied())} divisions of the GPUs "
            f"take at most {TIE:.0%} longer than the fastest one: a tie."
        )
        return Table(["s per step", "", "MFU", "GB per GPU", "layout"], rows, note)


def _complexity(candidate: Candidate) -> tuple:
    """Order equally fast layouts: fewer groups first, then a lower ZeRO stage, then less memory."""
    layout = candidate.layout
    split = layout.tp * layout.pp * layout.cp * layout.ep
    return split, layout.zero_stage, layout.chunks, layout.checkpointing == "full", candidate.gb


def search(
    job: Job,
    cluster: Cluster,
    usable: float = USABLE,
    zero_stages: tuple[int, ...] = (0, 1, 2, 3),
    schedules: tuple[str, ...] = SCHEDULES,
    context_ranks: tuple[int, ...] = (1,),
    expert_ranks: tuple[int, ...] = (1,),
) -> Found:
    """Compute the memory and the time of every layout that divides the model, the batch and the cluster.

    Args:
        usable: The part of a GPU's memory that a plan may fill.
        zero_stages: Those to try. With a single replica, there is nothing to shard, and stage 0 is the only one.
        context_ranks: The values of cp to try.
        expert_ranks: The values of ep to try.
    """
    found = Found(job, cluster, usable * cluster.gpu.memory_bytes)
    tried = possible(job, cluster, zero_stages, schedules, context_ranks, expert_ranks)
    found.candidates.extend(map(found.candidate, tried))
    return found


def possible(
    job: Job,
    cluster: Cluster,
    zero_stages: tuple[int, ...] = (0, 1, 2, 3),
    schedules: tuple[str, ...] = SCHEDULES,
    context_ranks: tuple[int, ...] = (1,),
    expert_ranks: tuple[int, ...] = (1,),
) -> Iterator[TrainingLayout]:
    """Yield every layout to try. Tensor parallelism may extend to two hosts."""
    # Fused attention is recomputed anyway, so selective checkpointing would change nothing.
    how = ("none", "full") if job.attention == "fused" else planner.CHECKPOINTING
    for tp, cp, ep in product(_powers_of_two(2 * cluster.gpus_per_host), context_ranks, expert_ranks):
        if cluster.gpus % (tp * cp):
            continue
        for pp in (size for size in range(1, job.shape.layers + 1) if cluster.gpus // (tp * cp) % size == 0):
            dp = cluster.gpus // (tp * cp) // pp
            options = product(zero_stages if dp * cp > 1 else (0,), MICRO_BATCHES, how, _schedules(job, pp, schedules))
            for zero_stage, micro_batch, checkpointing, (schedule, chunks) in options:
                settings = (zero_stage, micro_batch, checkpointing, schedule, chunks)
                layout = TrainingLayout(dp, pp, tp, *settings, cp=cp, ep=ep)
                if _divides(job, layout):
                    yield layout


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _schedules(job: Job, pp: int, schedules: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the schedules and numbers of chunks to try. Layers of a stage must divide into chunks."""
    if pp == 1:
        return [("1f1b", 1)]
    per_stage = layouts.layers_of_stage(job.shape, pp, pp // 2)
    chunks = [count for count in CHUNKS if per_stage % count == 0]
    return [(name, count) for name in schedules for count in (chunks if name == "interleaved" else [1])]


def _divides(job: Job, layout: TrainingLayout) -> bool:
    try:
        layouts.micro_batches(job, layout)
    except ValueError:
        return False
    return True
