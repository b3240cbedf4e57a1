"""Judge the functions that build schedules, for random numbers of stages, micro-batches and chunks."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from shared import schedules
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import value_error_of
from shared.checks.engine.failures import Wrong
from shared.schedules import Action

LARGE = (16, 96)  # stages and micro-batches of the largest case


@dataclass(frozen=True)
class Asked:
    """The arguments of a schedule."""

    stages: int
    micro_batches: int
    chunks: int | None = None
    limit: int | None = None

    @property
    def arguments(self) -> tuple[int, ...]:
        more = [each for each in (self.chunks, self.limit) if each is not None]
        return (self.stages, self.micro_batches, *more)

    def __str__(self) -> str:
        chunks = "" if self.chunks is None else f", {self.chunks} chunks per stage"
        limit = "" if self.limit is None else f", at most {self.limit} in flight"
        return f"{self.stages} stages, {self.micro_batches} micro-batches{chunks}{limit}"


def probe_schedule(build: Callable, asked: Asked) -> list[list[tuple]]:
    """Build a schedule on a rank. Returns it as tuples, whatever sequences the student's function returns."""
    return [[tuple(Action(*action)) for action in actions] for actions in build(*asked.arguments)]


def probe_alternate(alternate: Callable, micro_batches: int, warm_up: int) -> list[tuple]:
    forwards, backwards = ([Action(kind, index) for index in range(micro_batches)] for kind in "FB")
    found = [tuple(Action(*action)) for action in alternate(forwards, backwards, warm_up)]
    if (len(forwards), len(backwards)) != (micro_batches, micro_batches):
        raise AssertionError("alternate() has changed its lists, which are the same ones for every stage")
    return found


def probe_rejection(build: Callable, asked: Asked) -> str:
    """Return what a function says about arguments that it must reject, or "" if it accepts them."""
    return value_error_of(lambda: build(*asked.arguments))


def built(attempt: Attempt, asked: Asked) -> list[list[Action]]:
    """Build a schedule, and check that it is complete and does not deadlock."""
    found = attempt.run(probe_schedule, asked, context=str(asked))[0]
    schedule = [[Action(*action) for action in actions] for actions in found]
    if len(schedule) != asked.stages:
        raise Wrong(f"{asked}: the schedule has {len(schedule)} lists", "Hint: how many lists does a schedule have?")
    try:
        schedules.check_schedule(schedule)
    except ValueError as error:
        hint = "Hint: which action does each stage wait for, and who runs it?" if "deadlock" in str(error) else ""
        raise Wrong(f"{asked}: {error}", hint) from None
    sizes = schedules.micro_batches_of(schedule), schedules.chunks_of(schedule)
    if sizes != (asked.micro_batches, asked.chunks or 1):
        evidence = f"{asked}: the schedule is for {sizes[0]} micro-batches and {sizes[1]} chunks"
        raise Wrong(f"{evidence}; expected {asked.micro_batches} and {asked.chunks or 1}")
    return schedule


def draw(attempt: Attempt, with_chunks: bool = False) -> list[Asked]:
    """Draw cases. They include few and many micro-batches, a single stage, and a large case."""
    number = attempt.random.randint
    if with_chunks:
        drawn = [(number(1, 8), number(1, 4), number(1, 4)) for _ in range(6)]
        return [Asked(p, p * sets, v) for p, sets, v in [*drawn, (4, 2, 2), (LARGE[0], 6, 2)]]
    drawn = [(number(2, 8), number(1, 20)) for _ in range(6)]
    return [Asked(p, m) for p, m in [*drawn, (1, 3), (6, 2), (4, 8), LARGE]]


def judge_order(asked: Asked, schedule: list[list[Action]], expected: list[list[Action]], hint: str) -> None:
    """Compare a schedule with the expected one, action by action.

    Raises:
        Wrong: At the first difference. The message shows both orders of that stage.
    """
    for stage, (found, wanted) in enumerate(zip(schedule, expected, strict=True)):
        if found != wanted:
            index = next(i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1])
            shown, instead = (" ".join(map(str, each[: index + 3])) for each in (found, wanted))
            more = " …" if len(wanted) > index + 3 else ""
            raise Wrong(f"{asked}, stage {stage} runs {shown}{more}; expected {instead}{more}", hint)


def judge_bubble(asked: Asked, schedule: list[list[Action]], units: float, **costs: float) -> None:
    """Check the bubble of a schedule, in units of the simulation.

    Raises:
        Wrong: If it is longer.
    """
    simulated = schedules.simulate(schedule, **costs)
    idle = simulated.total - simulated.ideal
    if idle > units + 1e-9:
        message = f"{asked}: the bubble is as long as {idle:g} forwards of a stage; expected {units:g}"
        raise Wrong(message, "Hint: which stage waits, and which action could it run instead?")


def judge_in_flight(asked: Asked, schedule: list[list[Action]], most: Callable[[int], int]) -> None:
    """Check how many micro-batches each stage holds.

    Raises:
        Wrong: If a stage holds more than most(stage).
    """
    for stage, actions in enumerate(schedule):
        found, allowed = schedules.most_in_flight(actions), most(stage)
        if found > allowed:
            unit = "micro-batches" if asked.chunks is None else "chunks of micro-batches"
            message = f"{asked}: stage {stage} has up to {found} {unit} in flight; expected at most {allowed}"
            hint = "how many forwards come before the first backward?"
            if asked.limit is not None:
                hint = "which two counts tell how many micro-batches a stage has in flight?"
            raise Wrong(message, f"Hint: {hint}")


def judge_warm_up(asked: Asked, schedule: list[list[Action]], wanted: Callable[[int], int]) -> None:
    """Check that each stage runs wanted(stage) forwards before its first pair, if there are as many.

    Raises:
        Wrong: If a stage runs fewer.
    """
    for stage, actions in enumerate(schedule):
        found = [action.kind for action in actions].index("B")
        warm_up, every = wanted(stage), asked.micro_batches * (asked.chunks or 1)
        if found < min(warm_up + 1, every):
            more = (
                f"{warm_up + 1}: {warm_up} before the first pair, and one in it" if warm_up < every else f"all {every}"
            )
            message = f"{asked}: stage {stage} runs {found} forwards before its first backward; expected {more}"
            raise Wrong(message, "Hint: how many more forwards does a stage's warm-up have than the next stage's?")


def forwards_and_backwards_alternate(attempt: Attempt) -> None:
    number = attempt.random.randint
    drawn = [(number(2, 12), number(0, 12)) for _ in range(6)]
    for micro_batches, warm_up in [(4, 2), (4, 0), (3, 3), (2, 5), (3, 4), (1, 0), *drawn]:
        context = f"{micro_batches} forwards, warm_up={warm_up}"
        found = attempt.run(probe_alternate, micro_batches, warm_up, context=context)[0]
        first = min(warm_up, micro_batches)
        kinds = "F" * first + "FB" * (micro_batches - first) + "B" * first
        counts = {"F": count(), "B": count()}
        expected = [Action(kind, next(counts[kind])) for kind in kinds]
        actions = [Action(*action) for action in found]
        if actions != expected:
            shown, instead = (" ".join(map(str, each)) or "nothing" for each in (actions, expected))
            raise Wrong(
                f"{context}: the order is {shown}; expected {instead}",
                "Hint: how many forwards come before the first pair, and what is left after the last one?",
            )


def the_times_of_the_table(attempt: Attempt) -> None:
    for limit in (4, 1, 2, 3, 6):
        judge_under_limit(attempt, Asked(4, 8, limit=limit))


def limits_are_kept(attempt: Attempt) -> None:
    number = attempt.random.randint
    drawn = [(number(2, 8), number(1, 20), number(1, 8)) for _ in range(6)]
    for stages, micro_batches, limit in [*drawn, (1, 3, 2), (6, 2, 4), (5, 12, 2), (*LARGE, 5)]:
        judge_under_limit(attempt, Asked(stages, micro_batches, limit=limit))


def judge_under_limit(attempt: Attempt, asked: Asked) -> None:
    schedule = built(attempt, asked)
    assert asked.limit is not None
    limit = asked.limit
    judge_in_flight(asked, schedule, lambda stage: limit)
    found, allowed = schedules.simulate(schedule).total, units_under_limit(asked)
    if found > allowed + 1e-9:
        message = f"{asked}: the schedule takes {found:g} units; expected at most {allowed:g}"
        raise Wrong(message, "Hint: which stage waits for the next action of its list, and could run another one?")


def units_under_limit(asked: Asked) -> int:
    """Return how long a pipeline takes whose stages run a backward if they can, and otherwise a forward if they may."""
    last, micro_batches, limit = asked.stages - 1, asked.micro_batches, asked.limit
    assert limit is not None
    inputs, gradients = [deque() for _ in range(last + 1)], [deque() for _ in range(last + 1)]
    inputs[0].extend([0] * micro_batches)  # when each input of a stage has arrived; those of the first one at once
    free_at, held, left, now = [0] * (last + 1), [0] * (last + 1), (last + 1) * micro_batches, 0
    while left:
        for stage in range(last + 1):
            if free_at[stage] > now:
                continue
            if gradients[stage] and gradients[stage][0] <= now:
                gradients[stage].popleft()
                free_at[stage], held[stage], left = now + 2, held[stage] - 1, left - 1
                if stage:
                    gradients[stage - 1].append(now + 2)
            elif inputs[stage] and inputs[stage][0] <= now and held[stage] < limit:
                inputs[stage].popleft()
                free_at[stage], held[stage] = now + 1, held[stage] + 1
                (gradients[stage] if stage == last else inputs[stage + 1]).append(now + 1)
        now += 1
    return max(free_at)


def the_example_comes_out(attempt: Attempt) -> None:
    asked = Asked(2, 4, 2)
    schedule = built(attempt, asked)
    orders = {"F": "F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1", "B": "B0.1 B1.1 B0 B1 B2.1 B3.1 B2 B3"}
    for kind, order in orders.items():
        own = [[action for action in actions if action.kind == kind] for actions in schedule]
        hint = "Hint: after the first p actions, which chunk of which micro-batch comes next?"
        judge_order(asked, own, schedules.parse(order) * 2, hint)
    judge_interleaved(asked, schedule)


def chunks_shrink_the_bubble(attempt: Attempt) -> None:
    for asked in draw(attempt, with_chunks=True):
        judge_interleaved(asked, built(attempt, asked))


def judge_interleaved(asked: Asked, schedule: list[list[Action]]) -> None:
    p, v = asked.stages, asked.chunks or 1
    warm_ups = [2 * (p - stage - 1) + (v - 1) * p for stage in range(p)]
    judge_warm_up(asked, schedule, lambda stage: warm_ups[stage])
    judge_in_flight(asked, schedule, lambda stage: warm_ups[stage] + 1)
    judge_bubble(asked, schedule, 3.0 * (p - 1) / v)


def what_does_not_divide_is_rejected(attempt: Attempt) -> None:
    for stages, micro_batches in ((4, 6), (3, 2), (attempt.random.randint(2, 5) * 2, 7)):
        asked = Asked(stages, micro_batches, 2)
        message = attempt.run(probe_rejection, asked, context=str(asked))[0]
        if not message:
            hint = "Hint: is the last set of micro-batches complete?"
            raise Wrong(f"{asked} is accepted; expected a ValueError", hint)
        if not all(str(number) in message for number in (stages, micro_batches)):
            evidence = f"{asked}: the ValueError says {message!r}; expected it to name {stages} and {micro_batches}"
            raise Wrong(evidence, "Hint: does its message name both numbers?")


def weights_come_late(attempt: Attempt) -> None:
    for asked in draw(attempt):
        schedule, p = built(attempt, asked), asked.stages
        if any(action.kind == "W" for actions in schedule for action in actions) is False:
            raise Wrong(f"{asked}: the schedule has no W")
        most = min(p, asked.micro_batches)
        judge_in_flight(asked, schedule, lambda stage, most=most: most)
        units = p - 1 if asked.micro_batches >= p else math.inf
        judge_bubble(asked, schedule, units, forward=1, backward=2, weights=1)
