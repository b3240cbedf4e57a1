"""Judging a choice of strategy: on clusters that nobody has seen, against a table of every way there is.

Wrong rules are known too: a model and a cluster are drawn until each wrong rule would choose otherwise on some of them,
so whoever follows one is found out, and told by which.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared import clusters, planner
from shared.checks.framework import Attempt, Wrong
from shared.clusters import Cluster
from shared.model_shapes import SHAPES, ModelShape, gpt, llama

MOST_DRAWS = 4000
CASES_PER_RULE = 2
MARGIN = 1e-6  # from a limit, so that no rounding decides what fits; and no step is nearly as long as another
_GROUPS = ("all", "one host")


@dataclass(frozen=True)
class Way:
    stage: int
    shard_ranks: int
    checkpointing: str
    held_bytes: float
    step_s: float

    @property
    def least_apart(self) -> tuple:
        return self.stage, self.checkpointing != "selective", -self.shard_ranks

    def __str__(self) -> str:
        return f"stage {self.stage} over {self.shard_ranks}, {self.checkpointing}"


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    cluster: Cluster
    micro_batch: int = 1

    def __str__(self) -> str:
        gb = self.cluster.card_bytes / clusters.GB
        where = f"{self.cluster.hosts} hosts of {self.cluster.cards_per_host} × {gb:.3g} GB"
        return f"{self.shape.parameters / 1e9:.3g}B parameters on {where}, micro_batch={self.micro_batch}"

    def ways(self) -> list[Way]:
        """List all that can be tried."""
        cards, found = {"all": self.cluster.cards, "one host": self.cluster.cards_per_host}, []
        for stage, group, how in itertools.product(range(4), _GROUPS, ("full", "selective")):
            if stage == 0 and group == "one host":
                continue
            args = {"stage": stage, "checkpointing": how, "micro_batch": self.micro_batch}
            held_bytes = planner.plan(self.shape, ranks=cards[group], **args).total_bytes
            step_s = clusters.step_seconds(self.shape, self.cluster, shard_ranks=cards[group], **args)
            found.append(Way(stage, cards[group], how, held_bytes, step_s))
        return found

    def is_clear(self, ways: list[Way]) -> bool:
        """Is nothing decided by a rounding?"""
        room = 0.9 * self.cluster.card_bytes
        steps = sorted({way.step_s for way in ways})
        apart = all(b - a > MARGIN * a for a, b in itertools.pairwise(steps))
        return apart and all(abs(way.held_bytes - room) > MARGIN / 2 * room for way in ways)


Rule = Callable[[Case, list[Way]], Way | None]


def fastest(case: Case, ways: list[Way], room: float = 0.9, key=lambda way: (way.step_s, *way.least_apart)):
    return min((way for way in ways if way.held_bytes <= room * case.cluster.card_bytes), key=key, default=None)


def _with_one_sample(what: str) -> Rule:
    """Let one of the two estimates know nothing of the batch."""

    def rule(case: Case, ways: list[Way]) -> Way | None:
        others = replace(case, micro_batch=1).ways()
        pairs = zip(ways, others, strict=True)
        return fastest(case, [replace(way, **{what: getattr(other, what)}) for way, other in pairs])

    return rule


# What a rule gets wrong → (the rule, what to look at).
FITS: dict[str, tuple[Rule, str]] = {
    "fills the card": (lambda case, ways: fastest(case, ways, room=1.0), "how much of a card may be used?"),
    "leaves too much": (lambda case, ways: fastest(case, ways, room=0.8), "how much of a card may be used?"),
    "never recomputes": (
        lambda case, ways: fastest(case, [way for way in ways if way.checkpointing != "full"]),
        "which ways of checkpointing are tried?",
    ),
    "always recomputes": (
        lambda case, ways: fastest(case, [way for way in ways if way.checkpointing == "full"]),
        "which ways of checkpointing are tried?",
    ),
    "stops at stage 2": (
        lambda case, ways: fastest(case, [way for way in ways if way.stage < 3]),
        "which stages are tried?",
    ),
}
FAST: dict[str, tuple[Rule, str]] = {
    "holds the least": (
        lambda case, ways: fastest(case, ways, key=lambda way: (way.held_bytes, way.step_s)),
        "of what fits, is it the smallest or the fastest that is wanted?",
    ),
    "takes the first that fits": (
        lambda case, ways: fastest(case, ways, key=lambda way: way.least_apart),
        "of what fits, is it the first or the fastest that is wanted?",
    ),
    "shards over all cards": (
        lambda case, ways: fastest(case, [way for way in ways if way.shard_ranks == case.cluster.cards]),
        "over which groups is it tried to shard?",
    ),
    "shards in one host": (
        lambda case, ways: fastest(
            case, [way for way in ways if not way.stage or way.shard_ranks == case.cluster.cards_per_host]
        ),
        "over which groups is it tried to shard?",
    ),
}
TIES: dict[str, tuple[Rule, str]] = {
    "the higher stage": (
        lambda case, ways: fastest(case, ways, key=lambda way: (way.step_s, -way.stage, *way.least_apart)),
        "which of two equally fast stages takes less apart?",
    ),
    "recomputing": (
        lambda case, ways: fastest(
            case, ways, key=lambda way: (way.step_s, way.stage, way.checkpointing != "full", -way.shard_ranks)
        ),
        "of two equally fast ways, which recomputes less?",
    ),
    "the smaller group": (
        lambda case, ways: fastest(
            case, ways, key=lambda way: (way.step_s, way.stage, way.checkpointing != "selective", way.shard_ranks)
        ),
        "of two equally fast groups, which one is asked for?",
    ),
    "selective before the stage": (
        lambda case, ways: fastest(
            case, ways, key=lambda way: (way.step_s, way.checkpointing != "selective", *way.least_apart)
        ),
        "in which order do the three rules for equal steps decide?",
    ),
}
BATCHES: dict[str, tuple[Rule, str]] = {
    "one sample's memory": (_with_one_sample("held_bytes"), "does what fits depend on micro_batch?"),
    "one sample's time": (_with_one_sample("step_s"), "does a step's time depend on micro_batch?"),
}


def draw_case(draw: random.Random, larger_batches: bool = False) -> Case:
    width = 64 * draw.randrange(8, 160)
    if draw.random() < 0.3:
        shape = SHAPES[draw.choice(sorted(SHAPES))]
    elif draw.random() < 0.5:
        shape = gpt("drawn", draw.randrange(6, 90), width, width // 64, context=2 ** draw.randrange(8, 13))
    else:
        ffn, context = 64 * (width * 8 // 3 // 64), 2 ** draw.randrange(8, 14)
        shape = llama("drawn", draw.randrange(6, 90), width, width // 64, width // 64, ffn, 32000, context)
    hosts, cards = draw.choice((1, 2, 3, 4, 8, 32)), draw.choice((2, 4, 6, 8))
    inside = 10 ** draw.uniform(9, 11.5)
    cluster = Cluster(
        hosts, cards, 10 ** draw.uniform(10, 11.4), 10 ** draw.uniform(13, 15), inside, inside / draw.uniform(1, 60)
    )
    return Case(shape, cluster, draw.choice((2, 4, 8)) if larger_batches else 1)


def probe_choice(choose_strategy, cases: list[Case]) -> list:
    """→ stage, ranks, checkpointing and seconds of each choice"""
    chosen = []
    for case in cases:
        more = () if case.micro_batch == 1 else (case.micro_batch,)
        choice = choose_strategy(case.shape, case.cluster, *more)
        if choice is not None:
            choice = (choice.stage, choice.shard_ranks, choice.checkpointing, choice.step_s)
        chosen.append(choice)
    return chosen


def judge(attempt: Attempt, cases: list[Case], rules: dict[str, tuple[Rule, str]]) -> None:
    """Raises: Wrong where another strategy is chosen than the fastest of all that fit."""
    for case, found in zip(cases, attempt.run(probe_choice, cases)[0], strict=True):
        ways = case.ways()
        want = fastest(case, ways)
        if found is None or want is None:
            right, said = found is want is None, "None" if found is None else f"stage {found[0]} over {found[1]}"
        else:
            right, said = found[:3] == (want.stage, want.shard_ranks, want.checkpointing), "stage {} over {}, {}"
            said = said.format(*found[:3])
        if not right:
            hints = [hint for rule, hint in rules.values() if _same(found, rule(case, ways))]
            expected = "None, since nothing fits" if want is None else f"{want}: {want.step_s:.4g} s"
            raise Wrong(f"{case}: {said}; expected {expected}", f"Look at: {hints[0]}" if hints else "")
        if want is not None and not abs(found[3] - want.step_s) <= 1e-9 * want.step_s:
            raise Wrong(f"{case}: {said}, with step_s={found[3]}; expected {want.step_s:.6g}")


def _alike(one: Way | None, other: Way | None) -> bool:
    return one is other or bool(one and other and one.least_apart == other.least_apart)


def _same(found: tuple | None, way: Way | None) -> bool:
    return found is way is None or bool(found and way and found[:3] == (way.stage, way.shard_ranks, way.checkpointing))


def telling(attempt: Attempt, rules: dict[str, tuple[Rule, str]], larger_batches: bool = False) -> list[Case]:
    """Draw cases on which every one of these wrong rules is told from the right one."""
    cases, open_rules = [], dict.fromkeys(rules, CASES_PER_RULE)
    for _ in range(MOST_DRAWS):
        case = draw_case(attempt.random, larger_batches)
        ways = case.ways()
        if not case.is_clear(ways):
            continue
        want = fastest(case, ways)
        told = [name for name in open_rules if not _alike(rules[name][0](case, ways), want)]
        if told:
            cases.append(case)
            open_rules = {name: left - (name in told) for name, left in open_rules.items() if left > (name in told)}
        if not open_rules:
            return cases
    raise AssertionError(f"no case tells {', '.join(open_rules)} in {MOST_DRAWS} draws")


# -- the checks


def the_five_situations(attempt: Attempt) -> None:
    judge(attempt, [Case(*situation) for situation in clusters.SITUATIONS.values()], FITS | FAST | TIES)


def what_fits(attempt: Attempt) -> None:
    """And on cards on which the smallest way of all just fits, or just does not."""
    cases = telling(attempt, FITS)
    for case in cases[:3]:
        card_bytes = min(way.held_bytes for way in case.ways()) / 0.9
        for near in (1 - 2 * MARGIN, 1 + 2 * MARGIN):
            cases.append(replace(case, cluster=replace(case.cluster, card_bytes=near * card_bytes)))
    judge(attempt, cases, FITS)


def what_is_fast(attempt: Attempt) -> None:
    judge(attempt, telling(attempt, FAST), FAST)


def equally_long(attempt: Attempt) -> None:
    judge(attempt, telling(attempt, TIES), TIES)


def larger_batches(attempt: Attempt) -> None:
    judge(attempt, telling(attempt, BATCHES, larger_batches=True), BATCHES)
