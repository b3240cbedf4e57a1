"""Judging a choice of strategy: on clusters that nobody has seen, against a table of every way there is.

Wrong rules are known too: a model and a cluster are drawn until each wrong rule would choose otherwise on some of them,
so whoever follows one is found out, and told by which.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.production.ways import MARGIN, Case, Way, draw_case, fastest
from shared.planner import clusters

MOST_DRAWS = 4000
CASES_PER_RULE = 2

Rule = Callable[[Case, list[Way]], Way | None]


def _with_one_sample(what: str) -> Rule:
    """Let one of the two estimates know nothing of the batch."""

    def rule(case: Case, ways: list[Way]) -> Way | None:
        others = replace(case, micro_batch=1).ways()
        pairs = zip(ways, others, strict=True)
        return fastest(case, [replace(way, **{what: getattr(other, what)}) for way, other in pairs])

    return rule


def _told(what: str, **instead) -> Rule:
    """Let one of the two estimates be told something else than it should of every way. instead: it, of a case"""

    def rule(case: Case, ways: list[Way]) -> Way | None:
        believed = []
        for way in ways:
            told = {name: getattr(way, name) for name in ("stage", "shard_ranks", "checkpointing")}
            other = case.way(**told | {name: of(case) for name, of in instead.items()})
            believed.append(replace(way, **{what: getattr(other, what)}))
        return fastest(case, believed)

    return rule


def _copies_in_one_host(case: Case, ways: list[Way]) -> Way | None:
    copies = [case.way(0, case.cluster.gpus_per_host, how) for how in ("selective", "full")]
    return fastest(case, [*ways, *copies])


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
    "shards over all cards": (
        lambda case, ways: fastest(case, [way for way in ways if way.shard_ranks == case.cluster.gpus]),
        "over which groups is it tried to shard?",
    ),
    "shards in one host": (
        lambda case, ways: fastest(
            case, [way for way in ways if not way.stage or way.shard_ranks == case.cluster.gpus_per_host]
        ),
        "over which groups is it tried to shard?",
    ),
    "holds the least": (
        lambda case, ways: fastest(case, ways, key=lambda way: (way.held_bytes, way.step_s)),
        "of what fits, is it the smallest or the fastest that is wanted?",
    ),
    "takes the first that fits": (
        lambda case, ways: fastest(case, ways, key=lambda way: way.least_apart),
        "of what fits, is it the first or the fastest that is wanted?",
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

# Each is found out by the others' cases; here for what to look at.
KNOWN: dict[str, tuple[Rule, str]] = {
    "stage 0 in one host": (_copies_in_one_host, "what is stage 0 over one host, where there are others?"),
    "plan without checkpointing": (
        _told("held_bytes", checkpointing=lambda case: "none"),
        "what is plan told of checkpointing?",
    ),
    "plan over all cards": (
        _told("held_bytes", shard_ranks=lambda case: case.cluster.gpus),
        "over how many ranks does plan think it is shared?",
    ),
    "steps without checkpointing": (
        _told("step_s", checkpointing=lambda case: "selective"),
        "what is step_seconds told of checkpointing?",
    ),
}


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
    chosen = attempt.run(probe_choice, cases)[0]
    for case, found in zip(cases, chosen, strict=True):
        ways = case.ways()
        want = fastest(case, ways)
        said = "None" if found is None else "stage {} over {}, {}".format(*found)
        if not _same(found, want):
            expected = "None, since nothing fits" if want is None else f"{want}: {want.step_s:.4g} s"
            raise Wrong(f"{case}: {said}; expected {expected}", _hint(cases, chosen, rules))
        if want is not None and not abs(found[3] - want.step_s) <= 1e-9 * want.step_s:
            evidence = f"{case}: {said}, with step_s={found[3]:.6g}; expected {want.step_s:.6g}"
            raise Wrong(evidence, "Look at: what is step_seconds told?")


def _hint(cases: list[Case], chosen: list, rules: dict[str, tuple[Rule, str]]) -> str:
    """Recognise the wrong rule by all that it chose: one of this check's, or of another's.

    One wrong choice may be another's rule by chance; these cases were not drawn to tell those.
    """
    known = [(case, case.ways(), found) for case, found in zip(cases, chosen, strict=True)]
    wrong = sum(not _same(found, fastest(case, ways)) for case, ways, found in known)
    likely = rules | (KNOWN | FITS | FAST | TIES | BATCHES if wrong > 1 else {})
    for rule, hint in likely.values():
        if all(_same(found, rule(case, ways)) for case, ways, found in known):
            return f"Look at: {hint}"
    return "Look at: which ways are tried, what does each hold, and how long does each take?"


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


def in_favour_of(draw: random.Random, number: int) -> Case:
    """Draw a case that this one of all ways decides: it just fits on a card, and is the fastest."""
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
    judge(attempt, [Case(*situation) for situation in clusters.SITUATIONS.values()], FITS | FAST | TIES | KNOWN)


def what_fits(attempt: Attempt) -> None:
    """On cards on which each of all ways is once the right one, or the smallest just fits, or just does not."""
    cases = telling(attempt, FITS)
    smallest, each_way = cases[:3], range(len(cases[0].ways()))
    cases += [in_favour_of(attempt.random, number) for number in each_way]
    for case in smallest:
        gpu_bytes = min(way.held_bytes for way in case.ways()) / 0.9
        for near in (1 - 2 * MARGIN, 1 + 2 * MARGIN):
            cases.append(replace(case, cluster=replace(case.cluster, gpu_bytes=near * gpu_bytes)))
    judge(attempt, cases, FITS)


def what_is_fast(attempt: Attempt) -> None:
    judge(attempt, telling(attempt, FAST), FAST)


def equally_long(attempt: Attempt) -> None:
    judge(attempt, telling(attempt, TIES), TIES)


def larger_batches(attempt: Attempt) -> None:
    judge(attempt, telling(attempt, BATCHES, larger_batches=True), BATCHES)
