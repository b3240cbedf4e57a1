"""Checks of when a unit's all-gather is launched: while another unit computes, or after it. No clock is used.

A unit is recognized by the size of its collectives. Between two blocks, the model says when forward or backward passes.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.unit_layout import layout_of
from shared.checks.engine.sharded.unit_training import UnitPlan, shard, take_step
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.wire import completion, instrumentation

MODEL, STEPS = "Passed", 3


@dataclass(frozen=True)
class Event:
    """What happened: "launch" or "wait" of a unit's all-gather, or forward or backward about to enter a unit."""

    kind: str
    unit: int


class Log(completion.Watcher):
    def __init__(self, numbers: list[int], itemsize: int, world_size: int):
        super().__init__()
        self.numbers, self.itemsize, self.world_size = numbers, itemsize, world_size
        self.events: list[Event] = []
        self._works: dict[int, tuple] = {}  # with the Work, which keeps its id

    def launched(self, call, work, _tensors) -> None:
        unit = self._unit_of(call.payload_bytes / self.itemsize)
        if unit is not None and call.op != "recv":
            self.events.append(Event("launch", unit))
        if unit is not None:
            self._works[id(work)] = work, unit

    def _unit_of(self, numbers: float) -> int | None:
        near = [
            unit
            for unit, own in enumerate(self.numbers)
            if min(abs(numbers - own), abs(numbers - own / self.world_size)) <= self.world_size
        ]
        return near[0] if near else None

    def waited(self, work_id, _began) -> None:
        if work_id in self._works:
            self.events.append(Event("wait", self._works[work_id][1]))

    def passed(self, kind: str, unit: int) -> None:
        self.events.append(Event(kind, unit))


def probe_order(wrapper, plan: UnitPlan, numbers: list[int], seed: int, x, y) -> list[list[Event]]:
    """Return what happened, per step."""
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x, y = x.to(device_here()), y.to(device_here())
    found = []
    for _ in range(STEPS):
        log = Log(numbers, plan.dtype.itemsize, torch.distributed.get_world_size())
        module.passed = log.passed
        with completion.watching(log), instrumentation.listening(log.launched, log.waiting):
            take_step(wrapped, optimizer, plan, x, y)
        module.passed = None
        found.append(log.events)
    return found


def _try(attempt: Attempt, prefetch: int) -> tuple[list[list[list[Event]]], int]:
    """Return what happened, per rank and step, and how many units there are."""
    plan = UnitPlan(MODEL, options={"prefetch": prefetch})
    numbers = [sum(part.computed.numbers for part in unit) for unit in layout_of(MODEL).units]
    return attempt.run(probe_order, plan, numbers, per_rank=Draw(attempt).per_rank), len(numbers)


def the_next_unit_is_in_flight(attempt: Attempt) -> None:
    for prefetch in (1, 2):
        found, units = _try(attempt, prefetch)
        for rank, steps in enumerate(found):
            for number, events in list(enumerate(steps, 1))[1:]:  # the first forward knows of no order
                _judge_step(rank, events, units, prefetch, f"prefetch={prefetch}, step {number}")


def _judge_step(rank: int, events: list[Event], units: int, prefetch: int, said: str) -> None:
    """From the second unit on, each is launched while another computes: the one `prefetch` units before it."""
    if _first(events, Event("launch", 0), 0) < events.index(Event("forward", 0)):
        evidence = f"{said}, in forward: the all-gather of block 0 is launched before the root computes"
        raise Wrong({rank: evidence}, "Look at: which units call the prefetcher, and is the root one of them?")
    for phase, order in _orders(units):
        for index, unit in enumerate(order[1:], 1):
            before, entered = order[index - 1], events.index(Event(phase, unit))
            launched = _first(events, Event("launch", unit), _begin_of(events, phase, order))
            here = f"{said}, in {phase}: the all-gather of block {unit}"
            if launched is None or launched > entered:
                evidence = f"{here} is not in flight when block {before} is done"
                raise Wrong({rank: evidence}, "Look at: which unit is next, and when is it known?")
            waited = _first(events, Event("wait", unit), launched)
            if waited is not None and waited < entered:
                evidence = f"{said}, in {phase}: this rank waits for block {unit} before block {before} is done"
                raise Wrong({rank: evidence}, "Look at: who needs these parameters, and when?")
            latest = order[max(1, index - prefetch + 1)]
            if launched > events.index(Event(phase, latest)):
                evidence = f"{here} is not in flight when block {latest} is about to compute"
                raise Wrong({rank: evidence}, "Look at: how many units ahead?")
            first = order[max(0, index - prefetch)]
            if first != order[0] and launched < events.index(Event(phase, first)):
                evidence = f"{here} is launched before block {first} computes"
                raise Wrong({rank: evidence}, "Look at: how many units ahead?")


def nothing_is_launched_ahead(attempt: Attempt) -> None:
    """With prefetch=0: an all-gather is launched when the unit before is done."""
    found, units = _try(attempt, 0)
    for rank, steps in enumerate(found):
        for number, events in enumerate(steps, 1):
            for phase, order in _orders(units):
                for before, unit in pairwise(order):
                    launched = _first(events, Event("launch", unit), _begin_of(events, phase, order))
                    if launched is not None and launched < events.index(Event(phase, unit)):
                        said = f"prefetch=0, step {number}, in {phase}: the all-gather of block {unit} is launched"
                        hint = "Look at: how many units ahead does prefetch=0 allow?"
                        raise Wrong({rank: f"{said} before block {before} is done"}, hint)


def _orders(units: int) -> list[tuple[str, list[int]]]:
    forwards = list(range(units))
    return [("forward", forwards), ("backward", forwards[::-1])]


def _begin_of(events: list[Event], phase: str, order: list[int]) -> int:
    """Backward begins when the last block has been computed."""
    return 0 if phase == "forward" else events.index(Event("backward", order[0]))


def _first(events: list[Event], wanted: Event, begin: int) -> int | None:
    return next((index for index in range(begin, len(events)) if events[index] == wanted), None)
