"""Judge the choice of a layout on random clusters, against every possible layout.

The checks also know wrong rules. They draw models and clusters until each wrong rule would choose differently on some
of them, so a student who follows such a rule fails, and the hint points at that rule.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.planner import meshes
from shared.planner.clusters import GB, TFLOPS, Cluster
from shared.planner.meshes import Layout
from shared.planner.shapes import ModelShape, gpt, llama

_MARGIN = 1e-6  # relative distance from the limit of memory and between steps, so that no rounding decides a choice
_MOST_DRAWS = 4000
_CASES_PER_RULE = 2
_EXTRA_CASES = 6


@dataclass(frozen=True)
class Way:
    layout: Layout
    share: float  # of a GPU's memory
    step_s: float
    micro_batches: int  # of each replica

    @property
    def order(self) -> tuple:
        """The fastest way comes first. Of two equally fast ones, it is the one that shards less."""
        return self.step_s, self.layout.zero_stage


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    cluster: Cluster
    sequences: int

    def __str__(self) -> str:
        gb = self.cluster.gpu_bytes / GB
        where = f"{self.cluster.hosts} hosts of {self.cluster.gpus_per_host} × {gb:.3g} GB"
        return f"{self.shape.parameters / 1e9:.3g}B parameters on {where}, {self.sequences} sequences"

    def ways(self) -> list[Way]:
        """List every layout into which the model and the batch can be split."""
        gpus, found = self.cluster.gpus, []
        sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
        for dp, pp, tp in itertools.product(sizes, repeat=3):
            if dp * pp * tp != gpus or self.sequences % dp or self.shape.layers % pp or self.shape.heads % tp:
                continue
            for zero_stage in (0, 1):
                layout = Layout(dp, pp, tp, zero_stage)
                share = meshes.held_bytes(self.shape, layout, self.sequences) / self.cluster.gpu_bytes
                step_s = meshes.step_s(self.shape, self.cluster, layout, self.sequences)
                found.append(Way(layout, share, step_s, self.sequences // dp))
        return found

    def is_clear(self, ways: list[Way]) -> bool:
        """Return whether no choice depends on a rounding."""
        steps = sorted(way.step_s for way in ways if way.layout.zero_stage == 0)  # ZeRO-1 takes as long
        apart = all(later - step > _MARGIN * step for step, later in itertools.pairwise(steps))
        return apart and all(abs(way.share - meshes.ROOM) > _MARGIN for way in ways)


def fastest(ways: list[Way], room: float = meshes.ROOM, key=lambda way: way.order) -> Way | None:
    return min((way for way in ways if way.share <= room), key=key, default=None)


def draw_case(draw: random.Random) -> Case:
    heads = draw.choice((4, 8, 12, 16, 32))
    width, layers = 128 * heads, draw.choice((4, 8, 12, 24, 32, 48))
    context = 2 ** draw.randrange(8, 12)
    shape = gpt("drawn", layers, width, heads, context)
    if draw.random() < 0.5:
        shape = llama("drawn", layers, width, heads, heads, 64 * (width * 8 // 3 // 64), 32000, context)
    hosts, gpus_per_host = draw.choice((1, 2, 4, 6)), draw.choice((2, 4, 8))
    inside = 10 ** draw.uniform(9.5, 11.5)
    rates = 10 ** draw.uniform(0.5, 2.5) * TFLOPS, inside, inside / draw.uniform(1, 60)
    sequences = draw.choice((8, 12, 16, 48, 64, 96))
    return Case(shape, Cluster(hosts, gpus_per_host, 10 ** draw.uniform(9.3, 11.2), *rates), sequences)


Rule = Callable[[list[Way], Cluster], Way | None]

# The name of each mistake: (a rule that makes it, the hint).
RULES: dict[str, tuple[Rule, str]] = {
    "fills the GPU": (lambda ways, _: fastest(ways, room=1.0), "how much of a GPU's memory may be used?"),
    "ignores memory": (lambda ways, _: fastest(ways, room=math.inf), "which of the layouts fit at all?"),
    "holds the least": (
        lambda ways, _: fastest(ways, key=lambda way: (way.share, *way.order)),
        "of the layouts that fit, should you choose the smallest or the fastest?",
    ),
    "never shards": (
        lambda ways, _: fastest([way for way in ways if not way.layout.zero_stage]),
        "which ZeRO stages do you try?",
    ),
    "prefers ZeRO-1": (
        lambda ways, _: fastest(ways, key=lambda way: (way.step_s, -way.layout.zero_stage)),
        "if two layouts take equally long, which one is preferred?",
    ),
    "without a pipeline": (
        lambda ways, _: fastest([way for way in ways if way.layout.pp == 1]),
        "which sizes of each axis do you try?",
    ),
    "tp fills the host": (
        lambda ways, cluster: fastest([way for way in ways if way.layout.tp == cluster.gpus_per_host]),
        "which sizes of tp do you try, and must a group fill a host?",
    ),
    "tp inside a host": (
        lambda ways, cluster: fastest([way for way in ways if way.layout.tp <= cluster.gpus_per_host]),
        "do you leave out layouts that could be tried?",
    ),
    "as many replicas as possible": (
        lambda ways, _: fastest(ways, key=lambda way: (-way.layout.dp, *way.order)),
        "should you choose the layout with the most replicas, or the fastest one?",
    ),
    "as many micro-batches as stages": (
        lambda ways, _: fastest([way for way in ways if way.micro_batches >= way.layout.pp]),
        "do you leave out layouts with fewer micro-batches than stages?",
    ),
    "powers of two": (
        lambda ways, _: fastest([way for way in ways if all(n & (n - 1) == 0 for n in way.layout[:3])]),
        "which divisors of the number of GPUs do you try?",
    ),
}


def probe_choices(choose_layout: Callable, cases: list[Case]) -> list[tuple | None]:
    chosen = [choose_layout(case.shape, case.cluster, case.sequences) for case in cases]
    for layout in chosen:
        if not isinstance(layout, Layout | None):
            raise AssertionError(f"choose_layout() returned {layout!r:.100}; expected a Layout or None")
    return [None if layout is None else tuple(layout) for layout in chosen]


def judge(attempt: Attempt, cases: list[Case]) -> None:
    """Compare each choice with the fastest way that fits.

    Raises:
        Wrong: If it is another.
    """
    chosen = attempt.run(probe_choices, cases)[0]
    every = [case.ways() for case in cases]
    for case, ways, found in zip(cases, every, chosen, strict=True):
        best = fastest(ways)
        if found != (best and tuple(best.layout)):
            raise Wrong(_evidence(case, ways, found, best), _hint(cases, every, chosen, found, ways))


def _evidence(case: Case, ways: list[Way], found: tuple | None, best: Way | None) -> str:
    def said(way: Way | None) -> str:
        if way is None:
            return "None"
        dp, pp, tp, zero_stage = way.layout
        need = f"needs {way.share:.2%} of a GPU's memory and {way.step_s:.6g} s"
        return f"dp={dp}, pp={pp}, tp={tp}, ZeRO stage {zero_stage}, which {need}"

    own = next((way for way in ways if tuple(way.layout) == found), None)
    shown = said(own) if own or found is None else f"{found}, into which this model or batch cannot be split"
    return f"{case}: chose {shown}; expected {said(best)}"


def _hint(cases, every: list[list[Way]], chosen: list, found: tuple | None, ways: list[Way]) -> str:
    """Name the rule that would choose the same everywhere, or else look at one wrong choice."""
    for rule, hint in RULES.values():
        choices = [rule(ways, case.cluster) for case, ways in zip(cases, every, strict=True)]
        if [way and tuple(way.layout) for way in choices] == chosen:
            return f"Hint: {hint}"
    own = next((way for way in ways if tuple(way.layout) == found), None)
    if found is None:
        return "Hint: which layouts do you try, and how much of a GPU's memory may be used?"
    if own is None:
        return "Hint: what must dp, pp and tp divide, and what must their product be?"
    if own.share > meshes.ROOM:
        return "Hint: how much of a GPU's memory may be used?"
    if own.step_s == fastest(ways).step_s:
        return "Hint: if two layouts take equally long, which one is preferred?"
    return "Hint: do you try every layout, and compare the times of their steps?"


def the_three_situations(attempt: Attempt) -> None:
    judge(attempt, [Case(*situation) for situation in meshes.SITUATIONS.values()])


def drawn_clusters(attempt: Attempt) -> None:
    """Draw until every wrong rule chooses differently on some case."""
    cases, missing = [], dict.fromkeys(RULES, _CASES_PER_RULE)
    for _ in range(_MOST_DRAWS):
        case = draw_case(attempt.random)
        ways = case.ways()
        if not case.is_clear(ways):
            continue
        best = fastest(ways)
        different = [name for name in missing if missing[name] and RULES[name][0](ways, case.cluster) != best]
        if different:
            cases.append(case)
            for name in different:
                missing[name] -= 1
        if not any(missing.values()):
            break
    judge(attempt, [*cases, *_clear_cases(attempt), _only_a_large_tp()])


def _clear_cases(attempt: Attempt) -> list[Case]:
    drawn = (draw_case(attempt.random) for _ in range(_MOST_DRAWS))
    return list(itertools.islice((case for case in drawn if case.is_clear(case.ways())), _EXTRA_CASES))


def _only_a_large_tp() -> Case:
    """Return a case in which dp and pp can only be 1, so that 16 GPUs on two hosts form one tp group."""
    cluster = Cluster(2, 8, 80 * GB, 100 * TFLOPS, 200 * GB, 20 * GB)
    return Case(gpt("drawn", 13, 2048, 16, 1024), cluster, 9)


def nothing_may_fit(attempt: Attempt) -> None:
    shape = llama("drawn", 8, 4096, 32, 32, 11008, 32000, 1024)
    judge(attempt, [Case(shape, Cluster(1, 2, 8 * GB, 100 * TFLOPS, 200 * GB, 20 * GB), 8)])
