"""Pipeline schedules: which actions each stage runs, in which order, and whether that order can work.

    schedule = parse("F0 F1 B0 B1\\nF0 B0 F1 B1")     # one line per stage
    check_schedule(schedule)                           # raises ValueError if it is incomplete or would deadlock
    simulate(schedule).bubble_of_total                 # if forward takes 1 and backward 2 units of time

A pipeline of p stages with v chunks of layers each is a chain of p · v positions: chunk c of stage s is at position
c · p + s. Micro-batches go from position 0 to the last one, and their gradients go back.

This module knows the rules that every schedule must follow. Students of chapter 15 find out which orders are good.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "W": "the weight gradients of the backward"}


class Action(NamedTuple):
    """Something that a stage does with one micro-batch and one chunk of its layers.

    Attributes:
        kind: "F" for the forward, "B" for the backward. In a schedule with "W", "B" computes only what the previous
            stage waits for, and "W" computes the gradients of the weights later.
        micro_batch: Its index.
        chunk: The index of the chunk among those of the stage.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Schedule = Sequence[Sequence[Action]]


def parse(text: str) -> list[list[Action]]:
    """Read a schedule from text, with a line per stage and actions such as F0, B12 or, in chunk 1, F0.1.

    Raises:
        ValueError: If a word is not an action. The message names the line.
    """
    schedule = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
        actions = []
        for word in line.split():
            match = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", word)
            if match is None:
                raise ValueError(f"line {number}: {word!r} is not an action; write F0, B0 or W0, or F0.1 for chunk 1")
            kind, micro_batch, chunk = match.groups()
            actions.append(Action(kind, int(micro_batch), int(chunk or 0)))
        schedule.append(actions)
    return schedule


def write(schedule: Schedule) -> str:
    """Write a schedule as text that parse() reads."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def chunks_of(schedule: Schedule) -> int:
    """Return how many chunks of layers each stage has."""
    return 1 + max((action.chunk for actions in schedule for action in actions), default=0)


def micro_batches_of(schedule: Schedule) -> int:
    """Return how many micro-batches a schedule is for."""
    return 1 + max((action.micro_batch for actions in schedule for action in actions), default=-1)


def most_in_flight(actions: Sequence[Action]) -> int:
    """Return how many micro-batches a stage holds at most, each from its forward to the last action that needs it."""
    last = "W" if any(action.kind == "W" for action in actions) else "B"
    held = most = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind == last)
        most = max(most, held)
    return most


def check_schedule(schedule: Schedule) -> None:
    """Check that a schedule is complete and that no stage would wait forever.

    Raises:
        ValueError: If it is not. The message is one sentence.
    """
    micro_batches, chunks = micro_batches_of(schedule), chunks_of(schedule)
    if not micro_batches:
        raise ValueError("a schedule needs at least one stage with one action")
    for stage, actions in enumerate(schedule):
        kinds = "FBW" if any(action.kind == "W" for action in actions) else "FB"
        wanted = {Action(kind, m, c) for kind in kinds for m in range(micro_batches) for c in range(chunks)}
        if missing := sorted(wanted - set(actions)):
            raise ValueError(f"stage {stage} never runs {missing[0]}")
        if strangers := sorted(set(actions) - wanted):
            some = f"{', '.join(kinds)} of micro-batches 0 to {micro_batches - 1}, and chunks 0 to {chunks - 1}"
            raise ValueError(f"stage {stage} runs {strangers[0]}, but the schedule has {some}")
        if len(actions) > len(wanted):
            twice = next(action for action in actions if list(actions).count(action) > 1)
            raise ValueError(f"stage {stage} runs {twice} more than once")
        done: set[Action] = set()
        for action in actions:
            before = {"F": None, "B": "F", "W": "B"}[action.kind]
            if before and action._replace(kind=before) not in done:
                raise ValueError(f"stage {stage} runs {action} before {action._replace(kind=before)}")
            done.add(action)
    simulate(schedule)
    _check_messages(schedule)


def _check_messages(schedule: Schedule) -> None:
    """Check that each stage receives messages of a kind in the order in which its neighbor sends them.

    Raises:
        ValueError: If one does not, because it would then compute with the wrong message.
    """
    stages, last = len(schedule), len(schedule) * chunks_of(schedule) - 1
    for kind, step, message in (("F", 1, "output"), ("B", -1, "gradient")):
        for stage, actions in enumerate(schedule):
            receiver = (stage + step) % stages
            sent = [a for a in actions if a.kind == kind and 0 <= a.chunk * stages + stage + step <= last]
            received = [
                Action(kind, a.micro_batch, (a.chunk * stages + receiver - step) // stages)
                for a in schedule[receiver]
                if a.kind == kind and 0 <= a.chunk * stages + receiver - step <= last
            ]
            for first, wanted in zip(sent, received, strict=True):
                if first != wanted:
                    sends = f"stage {stage} sends the {message} of {first}"
                    raise ValueError(f"stage {receiver} receives the {message} of {wanted} where {sends}")


@dataclass(frozen=True)
class Span:
    """An action of a stage, and when it runs."""

    action: Action
    began: float
    ended: float


@dataclass(frozen=True)
class Simulated:
    """The times at which each stage runs the actions of a schedule."""

    stages: list[list[Span]]

    @property
    def total(self) -> float:
        """Return when the last action ends."""
        return max((span.ended for spans in self.stages for span in spans), default=0.0)

    @property
    def ideal(self) -> float:
        """Return how long the busiest stage computes."""
        return max((sum(span.ended - span.began for span in spans) for spans in self.stages), default=0.0)

    @property
    def bubble_of_ideal(self) -> float:
        """Return the idle time as a fraction of the time that a stage computes."""
        return (self.total - self.ideal) / self.ideal

    @property
    def bubble_of_total(self) -> float:
        """Return the idle time as a fraction of the total time."""
        return (self.total - self.ideal) / self.total


def simulate(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, weights: float | None = None
) -> Simulated:
    """Compute when each action of a schedule runs, without ranks. Messages take no time.

    Each stage starts its next action as soon as the inputs have arrived.

    Args:
        schedule: The actions of each stage.
        forward: How long the forward of all of a stage's layers takes.
        backward: How long their whole backward takes.
        weights: How long "W" takes, which is part of the backward. By default, half of it.

    Raises:
        ValueError: If stages wait for each other forever. The message names two of them.
    """
    stages, chunks = len(schedule), chunks_of(schedule)
    positions = stages * chunks
    of_weights = backward / 2 if weights is None else weights
    ended: dict[tuple[str, int, int], float] = {}  # by kind, micro-batch and position
    spans: list[list[Span]] = [[] for _ in schedule]

    def needed(stage: int, action: Action) -> tuple[str, int, int] | None:
        position = action.chunk * stages + stage
        if action.kind == "F":
            return ("F", action.micro_batch, position - 1) if position else None
        if action.kind == "W":
            return ("B", action.micro_batch, position)
        is_last = position == positions - 1
        return ("F", action.micro_batch, position) if is_last else ("B", action.micro_batch, position + 1)

    def cost(stage: int, action: Action) -> float:
        postpones = any(other.kind == "W" for other in schedule[stage])
        whole = {"F": forward, "B": backward - of_weights * postpones, "W": of_weights}[action.kind]
        return whole / chunks

    progresses = True
    while progresses:
        progresses = False
        for stage, actions in enumerate(schedule):
            while len(spans[stage]) < len(actions):
                action = actions[len(spans[stage])]
                needs = needed(stage, action)
                if needs is not None and needs not in ended:
                    break
                free = spans[stage][-1].ended if spans[stage] else 0.0
                began = free if needs is None else max(free, ended[needs])
                spans[stage].append(Span(action, began, began + cost(stage, action)))
                ended[action.kind, action.micro_batch, action.chunk * stages + stage] = spans[stage][-1].ended
                progresses = True
    waiting = {s: a[len(spans[s])] for s, a in enumerate(schedule) if len(spans[s]) < len(a)}

    def awaited(stage: int) -> tuple[str, int, int]:
        """Return what a waiting stage needs. One that needs nothing does not wait."""
        needs = needed(stage, waiting[stage])
        assert needs is not None
        return needs

    if waiting:
        stage, seen = next(iter(waiting)), set()
        while stage in waiting and stage not in seen:  # until it reaches a circle of stages that wait for each other
            seen.add(stage)
            blamed, stage = stage, awaited(stage)[2] % stages
        stage = stage if stage in waiting else blamed
        kind, micro_batch, position = awaited(stage)
        partner = position % stages
        instead = waiting.get(partner)
        does = f"stage {partner} is itself waiting to run {instead}" if instead else f"stage {partner} never runs that"
        missing = Action(kind, micro_batch, position // stages)
        until = f"until stage {partner} has run {missing}"
        raise ValueError(f"deadlock: stage {stage} waits to run {waiting[stage]} {until}, but {does}")
    return Simulated(spans)
