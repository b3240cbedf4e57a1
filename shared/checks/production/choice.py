"""Judge a choice of strategy on random clusters, against a table of every possible way to train.

The checks also know wrong rules. They draw models and clusters until each wrong rule would choose differently on some
of them, so a student who follows such a rule fails, and the hint points at that rule. If the choices follow none of
these rules, the hint depends on what is wrong with the first wrong choice.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from shared import planner
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.planner import clusters
from shared.planner.clusters import Cluster
from shared.planner.shapes import SHAPES, ModelShape, gpt, llama

# -- list every way to train a model on a cluster, find the fastest that fits, and draw models and clusters


MARGIN = 1e-6  # Relative distance from a limit and between steps, so that no rounding decides a choice.
_GROUPS = ("all", "one host")


@dataclass(frozen=True)
class Way:
    stage: int
    shard_ranks: int
    checkpointing: str
    held_bytes: float
    step_s: float

    @property
    def choice(self) -> tuple[int, int, str]:
        return self.stage, self.shard_ranks, self.checkpointing

    @property
    def shards_least(self) -> tuple:
        return self.stage, self.checkpointing != "selective", -self.shard_ranks

    def __str__(self) -> str:
        return f"stage {self.stage} over {self.shard_ranks} ranks, {self.checkpointing} checkpointing"


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    cluster: Cluster
    micro_batch: int = 1

    def __str__(self) -> str:
        gb = self.cluster.gpu_bytes / clusters.GB
        hosts = "1 host" if self.cluster.hosts == 1 else f"{self.cluster.hosts} hosts"
        where = f"{hosts} of {self.cluster.gpus_per_host} × {gb:.3g} GB"
        return f"{self.shape.parameters / 1e9:.3g}B parameters on {where}, micro_batch={self.micro_batch}"

    def ways(self) -> list[Way]:
        """List all ways that can be tried."""
        gpus, found = {"all": self.cluster.gpus, "one host": self.cluster.gpus_per_host}, []
        for stage, group, how in itertools.product(range(4), _GROUPS, ("full", "selective")):
            if stage == 0 and group == "one host":
                continue
            found.append(self.way(stage, gpus[group], how))
        return found

    def way(self, stage: int, shard_ranks: int, checkpointing: str) -> Way:
        args = {"stage": stage, "checkpointing": checkpointing, "micro_batch": self.micro_batch}
        held_bytes = planner.plan(self.shape, ranks=shard_ranks, **args).total_bytes
        step_s = clusters.step_seconds(self.shape, self.cluster, shard_ranks=shard_ranks, **args)
        return Way(stage, shard_ranks, checkpointing, held_bytes, step_s)

    def is_clear(self, ways: list[Way]) -> bool:
        """Return whether no choice depends on a rounding."""
        room = 0.9 * self.cluster.gpu_bytes
        steps = sorted({way.step_s for way in ways})
        apart = all(b - a > MARGIN * a for a, b in itertools.pairwise(steps))
        return apart and all(abs(way.held_bytes - room) > MARGIN / 2 * room for way in ways)


def fastest(case: Case, ways: list[Way], room: float = 0.9, key=lambda way: (way.step_s, *way.shards_least)):
    return min((way for way in ways if way.held_bytes <= room * case.cluster.gpu_bytes), key=key, default=None)


def draw_case(draw: random.Random, larger_batches: bool = False) -> Case:
    width = 64 * draw.randrange(8, 160)
    if draw.random() < 0.3:
        shape = SHAPES[draw.choice(sorted(SHAPES))]
    elif draw.random() < 0.5:
        shape = gpt("drawn", draw.randrange(6, 90), width, width // 64, context=2 ** draw.randrange(8, 13))
    else:
        ffn, context = 64 * (width * 8 // 3 // 64), 2 ** draw.randrange(8, 14)
        shape = llama("drawn", draw.randrange(6, 90), width, width // 64, width // 64, ffn, 32000, context)
    hosts, gpus_per_host = draw.choice((1, 2, 3, 4, 8, 32)), draw.choice((2, 4, 6, 8))
    inside = 10 ** draw.uniform(9, 11.5)
    cluster = Cluster(
        hosts,
        gpus_per_host,
        10 ** draw.uniform(10, 11.4),
        10 ** draw.uniform(13, 15),
        inside,
        inside / draw.uniform(1, 60),
    )
    return Case(shape, cluster, draw.choice((2, 4, 8)) if larger_batches else 1)


MOST_DRAWS = 4000
CASES_PER_RULE = 2
EQUALLY_FAST = 1e-3  # relative difference of two steps between which no planner can choose

Rule = Callable[[Case, list[Way]], Way | None]

_ON_BATCHES = "which arguments do you pass to planner.plan(), and for which micro-batch does it then plan?"


def _with_one_sample(what: str) -> Rule:
    """Return a rule in which one of the two estimates ignores the batch size."""

    def rule(case: Case, ways: list[Way]) -> Way | None:
        others = replace(case, micro_batch=1).ways()
        pairs = zip(ways, others, strict=True)
        return fastest(case, [replace(way, **{what: getattr(other, what)}) for way, other in pairs])

    return rule


def _with_wrong_argument(what: str, **instead) -> Rule:
    """Return a rule in which one of the two estimates gets a wrong argument for every way.

    Args:
        what: The estimate: "held_bytes" or "step_s".
        **instead: The wrong arguments, each computed from a case.
    """

    def rule(case: Case, ways: list[Way]) -> Way | None:
        believed = []
        for way in ways:
            arguments = {name: getattr(way, name) for name in ("stage", "shard_ranks", "checkpointing")}
            other = case.way(**arguments | {name: of(case) for name, of in instead.items()})
            believed.append(replace(way, **{what: getattr(other, what)}))
        return fastest(case, believed)

    return rule


def _copies_in_one_host(case: Case, ways: list[Way]) -> Way | None:
    copies = [case.way(0, case.cluster.gpus_per_host, how) for how in ("selective", "full")]
    return fastest(case, [*ways, *copies])


# The name of each mistake: (a rule that makes it, the hint).
FITS: dict[str, tuple[Rule, str]] = {
    "fills the GPU": (lambda case, ways: fastest(case, ways, room=1.0), "how much of a GPU's memory may be used?"),
    "leaves too much": (lambda case, ways: fastest(case, ways, room=0.8), "how much of a GPU's memory may be used?"),
    "never recomputes": (
        lambda case, ways: fastest(case, [way for way in ways if way.checkpointing != "full"]),
        "which kinds of checkpointing do you try?",
    ),
    "always recomputes": (
        lambda case, ways: fastest(case, [way for way in ways if way.checkpointing == "full"]),
        "which kinds of checkpointing do you try?",
    ),
    "stops at stage 2": (
        lambda case, ways: fastest(case, [way for way in ways if way.stage < 3]),
        "which stages do you try?",
    ),
}
FAST: dict[str, tuple[Rule, str]] = {
    "stage 0 in one host": (_copies_in_one_host, "what would stage 0 over one host mean if there are several hosts?"),
    "shards over all GPUs": (
        lambda case, ways: fastest(case, [way for way in ways if way.shard_ranks == case.cluster.gpus]),
        "which groups of GPUs do you try to shard over?",
    ),
    "shards in one host": (
        lambda case, ways: fastest(
            case, [way for way in ways if not way.stage or way.shard_ranks == case.cluster.gpus_per_host]
        ),
        "which groups of GPUs do you try to shard over?",
    ),
    "holds the least": (
        lambda case, ways: fastest(case, ways, key=lambda way: (way.held_bytes, way.step_s)),
        "of the strategies that fit, should you choose the smallest or the fastest?",
    ),
    "takes the first that fits": (
        lambda case, ways: fastest(case, ways, key=lambda way: way.shards_least),
        "of the strategies that fit, should you choose the first or the fastest?",
    ),
}
BATCHES: dict[str, tuple[Rule, str]] = {
    "one sample's memory": (_with_one_sample("held_bytes"), _ON_BATCHES),
    "one sample's time": (_with_one_sample("step_s"), "which arguments do you pass to step_seconds()?"),
}

# The cases of the other rules catch these too. They are listed here for their hints.
KNOWN: dict[str, tuple[Rule, str]] = {
    "one sample": (
        lambda case, ways: fastest(case, replace(case, micro_batch=1).ways()),
        "for which micro-batch do you compute the memory and the time of a step?",
    ),
    "plan without checkpointing": (
        _with_wrong_argument("held_bytes", checkpointing=lambda case: "none"),
        "which checkpointing argument do you pass to plan()?",
    ),
    "plan over all GPUs": (
        _with_wrong_argument("held_bytes", shard_ranks=lambda case: case.cluster.gpus),
        "which number of ranks do you pass to plan()?",
    ),
    "steps without checkpointing": (
        _with_wrong_argument("step_s", checkpointing=lambda case: "selective"),
        "which checkpointing argument do you pass to step_seconds()?",
    ),
}


def probe_choice(choose_strategy, cases: list[Case]) -> list:
    """Return the stage, ranks, checkpointing and seconds of each choice."""
    chosen = []
    for case in cases:
        more = () if case.micro_batch == 1 else (case.micro_batch,)
        choice = choose_strategy(case.shape, case.cluster, *more)
        if choice is not None:
            choice = (choice.stage, choice.shard_ranks, choice.checkpointing, choice.step_s)
        chosen.append(choice)
    return chosen


def judge(attempt: Attempt, cases: list[Case], rules: dict[str, tuple[Rule, str]]) -> None:
    """Judge that each choice is as fast as the fastest way that fits.

    Raises:
        Wrong: If it is slower, or does not fit.
    """
    chosen = attempt.run(probe_choice, cases)[0]
    for case, found in zip(cases, chosen, strict=True):
        ways = case.ways()
        best = fastest(case, ways)
        context = "None" if found is None else "stage {} over {} ranks, {} checkpointing".format(*found)
        if not _is_right(found, case, ways):
            what, expected, hint = _compare(case, ways, found, best)
            raise Wrong(f"{case}: chose {context}{what}; expected {expected}", _hint(cases, chosen, rules) or hint)
        way = _way_of(found, ways)
        if found is not None and way is not None and not abs(found[3] - way.step_s) <= 1e-9 * way.step_s:
            evidence = f"{case}: chose {context}, with step_s={found[3]:.6g}; expected {way.step_s:.6g}"
            raise Wrong(evidence, "Hint: which arguments do you pass to step_seconds()?")


def _compare(case: Case, ways: list[Way], found: tuple | None, best: Way | None) -> tuple[str, str, str]:
    """Describe what is wrong with a choice, and what was expected. Returns both, and a hint."""

    def needs(way: Way) -> str:
        return f"needs {100 * way.held_bytes / case.cluster.gpu_bytes:.7g}% of a GPU's memory"

    way = _way_of(found, ways)
    expected = "None, because nothing fits" if best is None else f"{best}, which takes {best.step_s:.6g} s"
    if found is None:
        hint = "Hint: do you try this one, and how much of a GPU's memory may be used?"
        return "", f"{best}, which {needs(best)}" if best else expected, hint
    if way is None:
        hint = f"Hint: which group sizes and which kinds of checkpointing do you try at stage {found[0]}?"
        return ", which is not one of the strategies to try", expected, hint
    if not _fits(way, case):
        alone = replace(case, micro_batch=1).way(way.stage, way.shard_ranks, way.checkpointing)
        only_alone = _fits(alone, case) and way.held_bytes > case.cluster.gpu_bytes
        hint = f"Hint: {_ON_BATCHES}" if only_alone else "Hint: how much of a GPU's memory may be used?"
        return f", which {needs(way)} (at most 90% may be used)", expected, hint
    hint = "Hint: do you try this one, too? How much memory does it need, and how long does its step take?"
    return f", which takes {way.step_s:.6g} s", expected, hint


def _hint(cases: list[Case], chosen: list, rules: dict[str, tuple[Rule, str]]) -> str:
    """Recognize the wrong rule, from this check or another one, by all of its choices.

    A single wrong choice may agree with another check's rule by chance, because these cases were not drawn to tell
    those rules apart. If the choices agree with rules that have different hints, none of these hints is given.
    """
    known = [(case, case.ways(), found) for case, found in zip(cases, chosen, strict=True)]
    wrong = [found for case, ways, found in known if not _is_right(found, case, ways)]

    def followed(rules: dict[str, tuple[Rule, str]]) -> list[str]:
        followed_rules = [
            hint for rule, hint in rules.values() if all(_same(found, rule(case, ways)) for case, ways, found in known)
        ]
        return list(dict.fromkeys(followed_rules))

    hints = followed(rules) or followed(KNOWN | FITS | FAST | BATCHES if len(wrong) > 1 else {})
    return f"Hint: {hints[0]}" if len(hints) == 1 else ""


def _fits(way: Way, case: Case) -> bool:
    return way.held_bytes <= 0.9 * case.cluster.gpu_bytes


def _way_of(found: tuple | None, ways: list[Way]) -> Way | None:
    """Return the way that was chosen, or None if it is not one of those to try."""
    return next((way for way in ways if _same(found, way)), None)


def _is_right(found: tuple | None, case: Case, ways: list[Way]) -> bool:
    """Tell whether a choice fits, and no other one is clearly faster. If nothing fits, None is right."""
    best, way = fastest(case, ways), _way_of(found, ways)
    if best is None or way is None:
        return found is None and best is None
    return _fits(way, case) and way.step_s <= best.step_s * (1 + EQUALLY_FAST)


def _alike(one: Way | None, other: Way | None) -> bool:
    return one is other or bool(one and other and one.shards_least == other.shards_least)


def _same(found: tuple | None, way: Way | None) -> bool:
    return found is way is None or bool(found and way and found[:3] == way.choice)


def draw_cases(attempt: Attempt, rules: dict[str, tuple[Rule, str]], draw=draw_case) -> list[Case]:
    """Draw cases on which each of these wrong rules chooses differently from the correct one and from the others."""
    cases, open_rules = [], dict.fromkeys(rules, CASES_PER_RULE)
    open_pairs = {(one, other) for one, other in itertools.combinations(rules, 2) if rules[one][1] != rules[other][1]}
    for _ in range(MOST_DRAWS):
        case = draw(attempt.random)
        ways = case.ways()
        if not case.is_clear(ways):
            continue
        by_rule = {name: rule(case, ways) for name, (rule, _) in rules.items()}
        chosen = {name: way and way.choice for name, way in by_rule.items()}
        exposed = [name for name in open_rules if not _is_right(chosen[name], case, ways)]
        apart = {pair for pair in open_pairs if not _alike(*(by_rule[name] for name in pair))}
        if exposed or apart:
            cases.append(case)
            open_rules = {
                name: left - (name in exposed) for name, left in open_rules.items() if left > (name in exposed)
            }
            open_pairs -= apart
        if not open_rules and not open_pairs:
            return cases
    raise AssertionError(f"no case exposes {', '.join(open_rules)} or tells {open_pairs} apart in {MOST_DRAWS} draws")


def draw_case_for(draw: random.Random, number: int) -> Case:
    """Draw a case in which this way just fits on a GPU and is the fastest."""
    for _ in range(MOST_DRAWS):
        case = draw_case(draw)
        ways = case.ways()
        gpu_bytes = ways[number].held_bytes / 0.9 * (1 + 2 * MARGIN)
        case = replace(case, cluster=replace(case.cluster, gpu_bytes=gpu_bytes))
        if case.is_clear(ways) and _alike(fastest(case, ways), ways[number]):
            return case
    raise AssertionError(f"no case for way {number} in {MOST_DRAWS} draws")


# -- the checks


def the_five_situations(attempt: Attempt) -> None:
    judge(attempt, [Case(*situation) for situation in clusters.SITUATIONS.values()], FITS | FAST | KNOWN)


def what_fits(attempt: Attempt) -> None:
    """Try GPUs for which each way is the correct one once, and GPUs on which the smallest way just fits or does not."""
    cases = draw_cases(attempt, FITS)
    smallest, each_way = cases[:3], range(len(cases[0].ways()))
    cases += [draw_case_for(attempt.random, number) for number in each_way]
    for case in smallest:
        gpu_bytes = min(way.held_bytes for way in case.ways()) / 0.9
        for near in (1 - 2 * MARGIN, 1 + 2 * MARGIN):
            cases.append(replace(case, cluster=replace(case.cluster, gpu_bytes=near * gpu_bytes)))
    judge(attempt, cases, FITS)


def what_is_fast(attempt: Attempt) -> None:
    judge(attempt, draw_cases(attempt, FAST), FAST)


def larger_batches(attempt: Attempt) -> None:
    judge(attempt, draw_cases(attempt, BATCHES, partial(draw_case, larger_batches=True)), BATCHES)
