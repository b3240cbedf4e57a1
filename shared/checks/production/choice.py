"""Judge a choice of strategy on random clusters, against a table of every possible way to train.

The checks also know wrong rules. They draw models and clusters until each wrong rule would choose differently on some
of them, so a student who follows such a rule fails, and the hint points at that rule.
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
        "of the ways that fit, should you choose the smallest or the fastest?",
    ),
    "takes the first that fits": (
        lambda case, ways: fastest(case, ways, key=lambda way: way.shards_least),
        "of the ways that fit, should you choose the first or the fastest?",
    ),
}
TIES: dict[str, tuple[Rule, str]] = {
    "the higher stage": (
        lambda case, ways: fastest(case, ways, key=lambda way: (way.step_s, -way.stage, *way.shards_least)),
        "if two stages are equally fast, which one shards less?",
    ),
    "recomputing": (
        lambda case, ways: fastest(
            case, ways, key=lambda way: (way.step_s, way.stage, way.checkpointing != "full", -way.shard_ranks)
        ),
        "if two ways are equally fast, which one recomputes less?",
    ),
    "the smaller group": (
        lambda case, ways: fastest(
            case, ways, key=lambda way: (way.step_s, way.stage, way.checkpointing != "selective", way.shard_ranks)
        ),
        "if two group sizes are equally fast, which one does the exercise ask for?",
    ),
    "selective before the stage": (
        lambda case, ways: fastest(
            case, ways, key=lambda way: (way.step_s, way.checkpointing != "selective", *way.shards_least)
        ),
        "in which order do the three tie-breaking rules apply?",
    ),
}
BATCHES: dict[str, tuple[Rule, str]] = {
    "one sample's memory": (_with_one_sample("held_bytes"), "does the memory that a way needs depend on micro_batch?"),
    "one sample's time": (_with_one_sample("step_s"), "does the time of a step depend on micro_batch?"),
}

# The cases of the other rules catch these too. They are listed here for their hints.
KNOWN: dict[str, tuple[Rule, str]] = {
    "stage 0 in one host": (_copies_in_one_host, "what would stage 0 over one host mean if there are several hosts?"),
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
    """Judge that each choice is the fastest way that fits.

    Raises:
        Wrong: If it is another.
    """
    chosen = attempt.run(probe_choice, cases)[0]
    for case, found in zip(cases, chosen, strict=True):
        ways = case.ways()
        best = fastest(case, ways)
        context = "None" if found is None else "stage {} over {} ranks, {} checkpointing".format(*found)
        if not _same(found, best):
            expected = "None, because nothing fits" if best is None else f"{best}, which takes {best.step_s:.4g} s"
            raise Wrong(f"{case}: chose {context}; expected {expected}", _hint(cases, chosen, rules))
        if best is not None and not abs(found[3] - best.step_s) <= 1e-9 * best.step_s:
            evidence = f"{case}: chose {context}, with step_s={found[3]:.6g}; expected {best.step_s:.6g}"
            raise Wrong(evidence, "Hint: which arguments do you pass to step_seconds()?")


def _hint(cases: list[Case], chosen: list, rules: dict[str, tuple[Rule, str]]) -> str:
    """Recognize the wrong rule, from this check or another one, by all of its choices.

    A single wrong choice may agree with another check's rule by chance, because these cases were not drawn to tell
    those rules apart.
    """
    known = [(case, case.ways(), found) for case, found in zip(cases, chosen, strict=True)]
    wrong = sum(not _same(found, fastest(case, ways)) for case, ways, found in known)
    likely = rules | (KNOWN | FITS | FAST | TIES | BATCHES if wrong > 1 else {})
    for rule, hint in likely.values():
        if all(_same(found, rule(case, ways)) for case, ways, found in known):
            return f"Hint: {hint}"
    return "Hint: which ways do you try, how much memory does each need, and how long does a step take?"


def _alike(one: Way | None, other: Way | None) -> bool:
    return one is other or bool(one and other and one.shards_least == other.shards_least)


def _same(found: tuple | None, way: Way | None) -> bool:
    return found is way is None or bool(found and way and found[:3] == (way.stage, way.shard_ranks, way.checkpointing))


def draw_cases(attempt: Attempt, rules: dict[str, tuple[Rule, str]], larger_batches: bool = False) -> list[Case]:
    """Draw cases on which each of these wrong rules chooses differently from the correct one."""
    cases, open_rules = [], dict.fromkeys(rules, CASES_PER_RULE)
    for _ in range(MOST_DRAWS):
        case = draw_case(attempt.random, larger_batches)
        ways = case.ways()
        if not case.is_clear(ways):
            continue
        expected = fastest(case, ways)
        exposed = [name for name in open_rules if not _alike(rules[name][0](case, ways), expected)]
        if exposed:
            cases.append(case)
            open_rules = {
                name: left - (name in exposed) for name, left in open_rules.items() if left > (name in exposed)
            }
        if not open_rules:
            return cases
    raise AssertionError(f"no case exposes {', '.join(open_rules)} in {MOST_DRAWS} draws")


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
    judge(attempt, [Case(*situation) for situation in clusters.SITUATIONS.values()], FITS | FAST | TIES | KNOWN)


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


def equally_fast(attempt: Attempt) -> None:
    judge(attempt, draw_cases(attempt, TIES), TIES)


def larger_batches(attempt: Attempt) -> None:
    judge(attempt, draw_cases(attempt, BATCHES, larger_batches=True), BATCHES)
