"""Judge the bubble and the choice of layouts on drawn jobs and clusters, against every possible layout.

The checks also know wrong rules. They draw jobs and clusters until each wrong rule would choose differently on some of
them, so a student who follows such a rule fails, and the hint points at that rule.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.failures import Wrong
from shared.planner import layouts
from shared.planner.layouts import H100, Cluster, Job, TrainingLayout
from shared.planner.links import REAL_LINKS
from shared.planner.search import GB, SITUATIONS, TIE, USABLE, possible
from shared.planner.shapes import gpt, llama

_MARGIN = 1e-6  # relative distance from the limits of memory and time, so that no rounding decides a choice
_SAME = 1e-9  # relative: two steps that differ by less are equally long
_MOST_DRAWS = 400
_CASES_PER_RULE = 1
_EXTRA_CASES = 2


# -- the bubble


@dataclass(frozen=True)
class Pipeline:
    busy_s: tuple[float, ...]
    message_s: float
    layout: TrainingLayout

    def __str__(self) -> str:
        chunks = f" with v = {self.layout.chunks}" if self.layout.chunks > 1 else ""
        busy = ", ".join(f"{each:g}" for each in self.busy_s)
        return f"stages that are busy for {busy} s, messages of {self.message_s:g} s, {self.layout.schedule}{chunks}"


def pipeline(busy_s: Sequence[float], message_s: float, schedule: str = "1f1b", chunks: int = 1) -> Pipeline:
    layout = TrainingLayout(dp=2, pp=len(busy_s), tp=2, schedule=schedule, chunks=chunks)
    return Pipeline(tuple(busy_s), message_s, layout)


# The name of each mistake in the bubble: (what it computes, the hint).
BUBBLES: dict[str, tuple[Callable, str]] = {
    "without messages": (
        lambda each: layouts.bubble_s(each.busy_s, 0.0, each.layout),
        "what does the first micro-batch cross between two stages?",
    ),
    "a message per stage": (
        lambda each: (
            layouts.bubble_s(each.busy_s, each.message_s, each.layout)
            + each.message_s / (each.layout.chunks if each.layout.schedule == "interleaved" else 1)
        ),
        "how many links are there between p stages?",
    ),
    "all stages": (
        lambda each: sum(each.busy_s) + (each.layout.pp - 1) * each.message_s,
        "does a stage wait while it is busy itself?",
    ),
    "every stage like the slowest": (
        lambda each: (each.layout.pp - 1) * (max(each.busy_s) + each.message_s),
        "are all other stages as slow as the slowest one?",
    ),
    "without the last stage": (
        lambda each: sum(each.busy_s[:-1]) + (each.layout.pp - 1) * each.message_s,
        "which stage sets the pace? Is it always the same one?",
    ),
    "one schedule": (
        lambda each: layouts.bubble_s(each.busy_s, each.message_s, replace(each.layout, schedule="1f1b")),
        "which schedules shorten the bubble, and by how much?",
    ),
}


def probe_bubbles(bubble_s: Callable, cases: list[Pipeline]) -> list[float]:
    found = [bubble_s(list(case.busy_s), case.message_s, case.layout) for case in cases]
    for seconds in found:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise AssertionError(f"bubble_s() returned {seconds!r:.100}; expected seconds, as a float")
    return [float(seconds) for seconds in found]


def judge_bubbles(attempt: Attempt, cases: list[Pipeline]) -> None:
    """Compare each bubble with the right one.

    Raises:
        Wrong: If it is another.
    """
    for case, found in zip(cases, attempt.run(probe_bubbles, cases)[0], strict=True):
        expected = layouts.bubble_s(case.busy_s, case.message_s, case.layout)
        if math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12):
            continue
        hint = next((hint for rule, hint in BUBBLES.values() if math.isclose(found, rule(case), rel_tol=1e-9)), "")
        message = f"{case}: returned {found:.6g} s; expected {expected:.6g} s"
        raise Wrong(message, f"Hint: {hint or 'through which stages does the first micro-batch pass?'}")


def equal_stages(attempt: Attempt) -> None:
    kinds = ("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1)
    judge_bubbles(attempt, [pipeline([3.0] * stages, 0.0, *kind) for stages in (1, 2, 4) for kind in kinds])


def drawn_stages(attempt: Attempt) -> None:
    cases, draw = [], attempt.random
    for schedule in ("1f1b", "gpipe", "interleaved", "zero_bubble") * 3:
        busy_s = [round(draw.uniform(1, 9), 2) for _ in range(draw.randint(1, 6))]
        chunks = draw.randint(2, 5) if schedule == "interleaved" else 1
        cases.append(pipeline(busy_s, round(draw.uniform(0.1, 2), 2), schedule, chunks))
    judge_bubbles(attempt, cases)


# -- the choice


@dataclass(frozen=True)
class Way:
    """A layout, the part of a GPU's memory that it needs, and the seconds of a step."""

    layout: TrainingLayout
    share: float
    step_s: float


@dataclass(frozen=True)
class Case:
    job: Job
    cluster: Cluster

    def __str__(self) -> str:
        gb = self.cluster.gpu.memory_bytes / GB
        where = f"{self.cluster.hosts} hosts of {self.cluster.gpus_per_host} × {gb:.3g} GB"
        return f"{self.job.shape.parameters / 1e9:.3g}B parameters on {where}, {self.job.sequences} sequences"

    def way(self, layout: TrainingLayout) -> Way:
        share = layouts.memory(self.job, layout).total_bytes / self.cluster.gpu.memory_bytes
        return Way(layout, share, layouts.step_time(self.job, layout, self.cluster).total_s)

    def ways(self) -> list[Way]:
        """List every layout into which the job can be divided."""
        return [self.way(layout) for layout in possible(self.job, self.cluster)]


def tied(ways: list[Way], room: float = USABLE, within: float = 1 + TIE, key=lambda way: way.step_s) -> list[Way]:
    """Return one of the fastest ways that fit for each division of the GPUs, of those within a tie."""
    best: dict[str, Way] = {}
    for way in sorted((way for way in ways if way.share <= room), key=key):
        best.setdefault(way.layout.sizes, way)
    ordered = sorted(best.values(), key=lambda way: way.step_s)
    return [way for way in ordered if way.step_s <= within * ordered[0].step_s]


def is_clear(ways: list[Way]) -> bool:
    """Return whether no choice depends on a rounding."""
    fitting = tied(ways, within=math.inf)
    limits = [way.step_s / ((1 + TIE) * fitting[0].step_s) for way in fitting]
    apart = all(later.step_s > (1 + _MARGIN) * way.step_s for way, later in itertools.pairwise(fitting))
    memory = all(abs(way.share - USABLE) > _MARGIN for way in ways)
    return apart and memory and all(abs(limit - 1) > _MARGIN for limit in limits)


def draw_case(draw: random.Random) -> Case:
    heads, layers = draw.choice((4, 8, 12, 16)), draw.choice((4, 6, 8, 12))
    width, context = 128 * heads, 2 ** draw.randrange(8, 12)
    shape = gpt("drawn", layers, width, heads, context)
    if draw.random() < 0.5:
        shape = llama("drawn", layers, width, heads, heads, 64 * (width * 8 // 3 // 64), 32000, context)
    per_parameter = draw.uniform(4, 40)  # bytes on all GPUs together
    hosts, gpus_per_host = draw.choice((1, 2, 3)), draw.choice((2, 4))
    gpu = replace(H100, memory_bytes=per_parameter * shape.parameters / (hosts * gpus_per_host) + 2 * GB)
    cluster = Cluster(hosts, gpu, REAL_LINKS[0], draw.choice(REAL_LINKS[4:]), draw.choice((1, 4)), gpus_per_host)
    return Case(Job(shape, draw.choice((8, 12, 16, 24))), cluster)


Rule = Callable[[list[Way]], list[Way]]

# The name of each mistake: (a rule that makes it, the hint).
RULES: dict[str, tuple[Rule, str]] = {
    "fills the GPU": (lambda ways: tied(ways, room=1.0), "how much of a GPU's memory may be used?"),
    "ignores memory": (lambda ways: tied(ways, room=math.inf), "which of the layouts fit at all?"),
    "only the fastest": (
        lambda ways: tied(ways, within=1.0),
        "which layouts can a planner not tell from the fastest?",
    ),
    "all that fit": (lambda ways: tied(ways, within=math.inf), "how much slower may a layout be?"),
    "holds the least": (
        lambda ways: tied(ways, key=lambda way: way.share),
        "of the layouts with the same sizes, should you keep the smallest or the fastest?",
    ),
    "ties with a layout that does not fit": (
        lambda ways: [
            way for way in tied(ways, within=math.inf) if way.step_s <= (1 + TIE) * min(each.step_s for each in ways)
        ],
        "which is the fastest layout: of all, or of those that fit?",
    ),
    "never shards": (
        lambda ways: tied([way for way in ways if not way.layout.zero_stage]),
        "which ZeRO stages do you try?",
    ),
    "without a pipeline": (
        lambda ways: tied([way for way in ways if way.layout.pp == 1]),
        "which sizes of each axis do you try?",
    ),
    "one sequence at a time": (
        lambda ways: tied([way for way in ways if way.layout.micro_batch == 1]),
        "which micro-batches do you try?",
    ),
    "never recomputes": (
        lambda ways: tied([way for way in ways if way.layout.checkpointing == "none"]),
        "which kinds of checkpointing do you try?",
    ),
}


def _sizes(ways: list[Way]) -> list[str]:
    return [way.layout.sizes for way in ways]


def _same(ways: list[Way], others: list[Way]) -> bool:
    """Return whether two choices have the same sizes and seconds, in the same order."""
    steps = (math.isclose(a.step_s, b.step_s, rel_tol=_SAME) for a, b in zip(ways, others, strict=False))
    return _sizes(ways) == _sizes(others) and all(steps)


def probe_choices(choose_layouts: Callable, cases: list[Case]) -> list[list[TrainingLayout]]:
    chosen = [choose_layouts(case.job, case.cluster) for case in cases]
    for found in chosen:
        if not isinstance(found, list) or not all(isinstance(each, TrainingLayout) for each in found):
            raise AssertionError(f"choose_layouts() returned {found!r:.100}; expected a list of TrainingLayouts")
    return chosen


def judge(attempt: Attempt, cases: list[Case]) -> None:
    """Compare each choice with the layouts that fit and are a tie.

    Raises:
        Wrong: If it is another.
    """
    chosen = attempt.run(probe_choices, cases)[0]
    for case, found in zip(cases, chosen, strict=True):
        ways = case.ways()
        by_layout = {way.layout: way for way in ways}
        strangers = [each for each in found if each not in by_layout]
        if strangers:
            message = f"{case}: chose {strangers[0]}, which possible() does not yield"
            raise Wrong(message, "Hint: which layouts do you try?")
        own, expected = [by_layout[each] for each in found], tied(ways)
        if not _same(own, expected):
            raise Wrong(_evidence(case, own, expected), _hint(own, ways, expected))


def _evidence(case: Case, own: list[Way], expected: list[Way]) -> str:
    def said(ways: list[Way]) -> str:
        texts = [f"{way.layout} ({way.share:.1%} of a GPU's memory, {way.step_s:.6g} s)" for way in ways[:2]]
        more = [f"{len(ways) - 2} more"] if len(ways) > 2 else []
        return ", ".join([*texts, *more]) or "no layout"

    at = next((index for index, (a, b) in enumerate(zip(own, expected, strict=False)) if not _same([a], [b])), 0)
    at = at or (min(len(own), len(expected)) if _sizes(own) != _sizes(expected) and _same(own[:1], expected[:1]) else 0)
    where = f"from index {at}: " if at else ""
    return f"{case}: {where}chose {said(own[at:])}; expected {said(expected[at:])}"


def _hint(own: list[Way], ways: list[Way], expected: list[Way]) -> str:
    """Name the rule that would choose the same."""
    if len(set(_sizes(own))) < len(own):
        return "Hint: how many layouts with the same sizes do you keep?"
    if _same(sorted(own, key=lambda way: way.step_s), expected):
        return "Hint: in which order should the layouts be?"
    for rule, hint in RULES.values():
        if _same(own, rule(ways)):
            return f"Hint: {hint}"
    if any(way.share > USABLE for way in own):
        return "Hint: how much of a GPU's memory may be used?"
    return "Hint: do you try every layout, and compare the times of their steps?"


the_three_situations = on_each(judge, [Case(*situation) for situation in SITUATIONS.values()])


def drawn_clusters(attempt: Attempt) -> None:
    """Draw until every wrong rule chooses differently on some case."""
    cases, missing, extra = [], dict.fromkeys(RULES, _CASES_PER_RULE), _EXTRA_CASES
    for _ in range(_MOST_DRAWS):
        case = draw_case(attempt.random)
        ways = case.ways()
        expected = tied(ways)
        if not expected or not is_clear(ways):
            continue
        different = [name for name in missing if missing[name] > 0 and not _same(RULES[name][0](ways), expected)]
        if different or extra > 0:
            cases.append(case)
            extra -= not different
            for name in different:
                missing[name] -= 1
        if not any(left > 0 for left in missing.values()):
            break
    judge(attempt, cases)


def nothing_may_fit(attempt: Attempt) -> None:
    shape = llama("drawn", 8, 4096, 32, 32, 11008, 32000, 1024)
    gpu = replace(H100, memory_bytes=8 * GB)
    judge(attempt, [Case(Job(shape, 8), Cluster(1, gpu, REAL_LINKS[0], REAL_LINKS[4], 1, gpus_per_host=2))])
