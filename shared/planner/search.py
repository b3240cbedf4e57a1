"""Searches all layouts of a job on a cluster for the fastest one that fits, and says why it is that one.

    found = search(Job(SHAPES["Llama-2 70B"], sequences=1024), layouts.a100_hosts(4))
    found.best.layout, found.best.time.total_s, found.why()

The space is dp × tp × pp × ZeRO stage × micro-batch × checkpointing × schedule. The search tries all of it, because it
has only thousands of layouts. `layouts` computes the memory and the time of each one, and says what that leaves out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shared import planner
from shared.planner import layouts
from shared.planner.layouts import Cluster, Job, Layout, StepTime
from shared.tables import Table

GB = 1e9
USABLE = 0.9  # the part of a GPU's memory that a plan may fill
MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = ("1f1b", "interleaved")
CHUNKS = (2, 3, 4, 5, 6, 7, 8)
_SAME = 1.001  # two layouts whose times differ by less are equally fast: the simpler one wins


@dataclass(frozen=True)
class Candidate:
    """A layout, what it needs, and whether that is available."""

    layout: Layout
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
    candidates: list[Candidate]

    @cached_property
    def best(self) -> Candidate | None:
        """Return the fastest layout that fits, or None if none does."""
        return self.best_of(lambda layout: True)

    @property
    def mfu(self) -> float:
        return layouts.mfu(self.job, self.best.time.total_s, self.cluster)

    def best_of(self, wanted: Callable[[Layout], bool]) -> Candidate | None:
        """Return the fastest layout that fits, of those that are wanted. Of equally fast ones, it is the simplest."""
        fitting = [each for each in self.candidates if each.fits and wanted(each.layout)]
        if not fitting:
            return None
        fastest_s = min(each.time.total_s for each in fitting)
        return min((each for each in fitting if each.time.total_s < _SAME * fastest_s), key=_complexity)

    def smallest_of(self, wanted: Callable[[Layout], bool]) -> Candidate | None:
        """Return the layout that needs the least memory, of those that are wanted."""
        return min((each for each in self.candidates if wanted(each.layout)), key=lambda each: each.gb, default=None)

    def why(self) -> str:
        """Say in a sentence what ruled out the neighbors of the best layout."""
        if self.best is None:
            least = self.smallest_of(lambda layout: True)
            return f"Nothing fits: the smallest layout ({least.layout}) needs {least.gb:.0f} GB per GPU."
        reasons = "; ".join(f"{name} {reason}" for name, reason in self.neighbors().items())
        return f"{self.best.layout}: {reasons}."

    def neighbors(self) -> dict[str, str]:
        """Say what is wrong with the nearest other choices, each with everything else chosen anew."""
        best, reasons = self.best.layout, {}
        choices = {f"TP {value}": ("tp", value) for value in (best.tp // 2, 2 * best.tp)}
        choices |= {f"PP {value}": ("pp", value) for value in self._next_sizes(best.pp)}
        choices |= {planner.STAGES[stage]: ("zero_stage", stage) for stage in range(4) if stage != best.zero_stage}
        choices |= {f"checkpointing {how}": ("checkpointing", how) for how in ("none", "full") if how != best.checkpointing}
        choices |= {f"micro-batch {value}": ("micro_batch", value) for value in (best.micro_batch // 2, 2 * best.micro_batch)}
        for name, (field, value) in choices.items():
            reason = self._against(field, value)
            if reason:
                reasons[name] = reason
        return reasons

    def _next_sizes(self, pp: int) -> list[int]:
        """Return the next smaller and the next larger number of stages that the search has tried."""
        sizes = sorted({each.layout.pp for each in self.candidates})
        index = sizes.index(pp)
        return sizes[max(0, index - 1) : index] + sizes[index + 1 : index + 2]

    def _against(self, field: str, value: object) -> str | None:
        """Say why no layout with this value is better than the best one, or None if there is none."""

        def has_it(layout: Layout) -> bool:
            return getattr(layout, field) == value

        least, other = self.smallest_of(has_it), self.best_of(has_it)
        if least is None:
            return None
        if other is None:
            return f"needs at least {least.gb:.0f} GB per GPU"
        slower = other.time.total_s / self.best.time.total_s - 1
        if slower < _SAME - 1:
            return "is as fast"
        mine, theirs = self.best.time.by_part(), other.time.by_part()
        grown = max(mine, key=lambda part: theirs[part] - mine[part])
        shares = f"{mine[grown]:.3g} s become {theirs[grown]:.3g} s"
        return f"is {slower:.1%} slower ({grown}: {shares})"

    def table(self, count: int = 5) -> Table:
        """Show the fastest layouts that fit, at most one per dp × pp × tp."""
        kinds: dict[tuple, Candidate] = {}
        for each in self.candidates:
            kind = (each.layout.dp, each.layout.pp, each.layout.tp)
            if each.fits and kind not in kinds:
                kinds[kind] = self.best_of(lambda layout, kind=kind: (layout.dp, layout.pp, layout.tp) == kind)
        rows = []
        for each in sorted(kinds.values(), key=lambda each: each.time.total_s)[:count]:
            utilization = layouts.mfu(self.job, each.time.total_s, self.cluster)
            rows.append([str(each.layout), f"{each.gb:.0f}", f"{each.time.total_s:.3g}", f"{utilization:.0%}"])
        fitting = sum(each.fits for each in self.candidates)
        note = (
            f"{self.job.shape.name} on {self.cluster.gpus:,} {self.cluster.gpu.name}, {self.job.sequences:,} sequences "
            f"per step: of {len(self.candidates):,} layouts, {fitting:,} fit."
        )
        return Table(["layout", "GB per GPU", "s per step", "MFU"], rows, note)


def _complexity(candidate: Candidate) -> tuple:
    """Order equally fast layouts: fewer groups first, then a lower ZeRO stage, then less memory."""
    layout = candidate.layout
    split = layout.tp * layout.pp
    return split, layout.zero_stage, layout.chunks, layout.checkpointing == "full", candidate.gb


def search(job: Job, cluster: Cluster, usable: float = USABLE, schedules: tuple[str, ...] = SCHEDULES) -> Found:
    """Compute the memory and the time of every layout that divides the model, the batch and the cluster.

    Args:
        usable: The part of a GPU's memory that a plan may fill.
    """
    candidates = []
    for layout in possible(job, cluster, schedules):
        plan = layouts.memory(job, layout)
        fits = plan.total_bytes <= usable * cluster.gpu.memory_bytes
        candidates.append(Candidate(layout, plan, layouts.step_time(job, layout, cluster), fits))
    return Found(job, cluster, candidates)


def possible(job: Job, cluster: Cluster, schedules: tuple[str, ...] = SCHEDULES) -> Iterator[Layout]:
    """Yield every layout to try. Tensor parallelism may extend to two hosts."""
    how = ("none", "full") if job.attention == "fused" else planner.CHECKPOINTING  # fused attention is recomputed anyway
    for tp in _powers_of_two(2 * cluster.gpus_per_host):
        if cluster.gpus % tp:
            continue
        for pp in (size for size in range(1, job.shape.layers + 1) if cluster.gpus // tp % size == 0):
            dp = cluster.gpus // tp // pp
            for zero_stage in range(4) if dp > 1 else (0,):
                for micro_batch in MICRO_BATCHES:
                    for checkpointing in how:
                        for schedule, chunks in _schedules(job, pp, schedules):
                            layout = Layout(dp, tp, pp, zero_stage, micro_batch, checkpointing, schedule, chunks)
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


def _divides(job: Job, layout: Layout) -> bool:
    try:
        layouts.micro_batches(job, layout)
    except ValueError:
        return False
    return True
