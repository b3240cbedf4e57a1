# Built by `make notebooks` from source/15_pipeline_parallel/lab.py: edit that, not this.
"""Pipeline schedules: which micro-batch each stage computes when.

A schedule is a list with one entry per stage: the list of its actions, in the order in which it runs them. p is the
number of stages, m that of micro-batches, and v that of chunks of layers per stage.
"""

import math

from shared.schedules import Action


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Order a stage's actions: warm_up forwards, then pairs of a forward and a backward, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def gpipe(stages: int, micro_batches: int) -> list[list[Action]]:
    """Schedule all forwards, then all backwards.

    Bubble: (p − 1) / m of the ideal time.
    Memory: m micro-batches in flight on every stage.
    Source: Huang et al. 2019, "GPipe", §2.3.
    """
    forwards = [Action("F", index) for index in range(micro_batches)]
    backwards = [Action("B", index) for index in range(micro_batches)]
    return [alternate(forwards, backwards, micro_batches) for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> list[list[Action]]:
    """Schedule each backward as early as possible.

    Bubble: (p − 1) / m of the ideal time, as with GPipe.
    Memory: at most p − s micro-batches in flight on stage s.
    Source: Narayanan et al. 2019, "PipeDream", §3.2; Narayanan et al. 2021, "Megatron-LM", §2.2.1.
    """
    forwards = [Action("F", index) for index in range(micro_batches)]
    backwards = [Action("B", index) for index in range(micro_batches)]
    return [alternate(forwards, backwards, stages - stage - 1) for stage in range(stages)]


def under_limit(stages: int, micro_batches: int, limit: int) -> list[list[Action]]:
    """Schedule each backward as early as possible, with at most `limit` micro-batches in flight on a stage.

    Bubble: that of 1F1B if the limit is at least min(p, m), and longer otherwise.
    Memory: at most min(limit, m) micro-batches in flight on a stage.
    """
    schedule = [[] for _ in range(stages)]
    free_at, forwards, backwards = [0] * stages, [0] * stages, [0] * stages
    ends = {}  # when an action ends, by kind, micro-batch and stage

    def has_ended(kind: str, micro_batch: int, stage: int) -> bool:
        return ends.get((kind, micro_batch, stage), math.inf) <= now

    for now in range(3 * stages * micro_batches):
        for stage, actions in enumerate(schedule):
            f, b = forwards[stage], backwards[stage]
            if free_at[stage] > now:
                continue
            if has_ended("F", b, stage) and (stage == stages - 1 or has_ended("B", b, stage + 1)):
                action, units, backwards[stage] = Action("B", b), 2, b + 1
            elif f < micro_batches and f - b < limit and (stage == 0 or has_ended("F", f, stage - 1)):
                action, units, forwards[stage] = Action("F", f), 1, f + 1
            else:
                continue
            actions.append(action)
            free_at[stage] = ends[action.kind, action.micro_batch, stage] = now + units
    return schedule


def interleaved(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """Schedule 1F1B for stages that each have several chunks of layers.

    Bubble: (p − 1) / (v · m) of the ideal time.
    Memory: at most 2(p − s − 1) + (v − 1)p + 1 chunks of micro-batches in flight on stage s.
    Raises:
        ValueError: if m is not a multiple of p.
    Source: Narayanan et al. 2021, "Megatron-LM", §2.2.2.
    """
    if micro_batches % stages:
        raise ValueError(
            f"an interleaved schedule needs a multiple of {stages} micro-batches, one for each stage, "
            f"got {micro_batches}"
        )
    forwards, backwards = [], []
    for first in range(0, micro_batches, stages):
        for chunk in range(chunks):
            for micro_batch in range(first, first + stages):
                forwards.append(Action("F", micro_batch, chunk))
                backwards.append(Action("B", micro_batch, chunks - 1 - chunk))
    warm_ups = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return [alternate(forwards, backwards, warm_up) for warm_up in warm_ups]


def zero_bubble(stages: int, micro_batches: int) -> list[list[Action]]:
    """Schedule 1F1B with weight gradients that stage s postpones by s backwards.

    Bubble: (p − 1) / 3m of the ideal time if F, B and W take equally long and m ≥ p.
    Memory: at most p micro-batches in flight on every stage.
    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", §2, schedule ZB-H1.
    """
    schedule = []
    for stage, actions in enumerate(one_f_one_b(stages, micro_batches)):
        postponed = []
        for action in actions:
            postponed.append(action)
            if action.kind == "B" and action.micro_batch >= stage:
                postponed.append(Action("W", action.micro_batch - stage))
        left = range(max(0, micro_batches - stage), micro_batches)
        schedule.append(postponed + [Action("W", index) for index in left])
    return schedule
