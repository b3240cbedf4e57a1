"""Judge when a unit's all-gather is launched: while another unit computes, or after it. No clock is used.

A unit is recognized by the size of its collectives. Between two blocks, the model reports when forward or backward
passes.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.unit_training import UnitPlan, layout_of, shard, take_step
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.wire import completion, instrumentation

MODEL, STEPS = "Passed", 3
_HOOKS = {"forward": "pre_forward()", "backward": "pre_backward()"}  # the hooks that prefetch, by phase


@dataclass(frozen=True)
class Event:
    """Describe an event: "launch" or "wait" of a unit's all-gather, or forward or backward about to enter a unit."""

    kind: str
    unit: int


class Log(completion.Watcher):
    def __init__(self, numels: list[int], itemsize: int, world_size: int):
        super().__init__()
        self.numels, self.itemsize, self.world_size = numels, itemsize, world_size
        self.events: list[Event] = []
        self._works: dict[int, tuple] = {}  # Keeping the Work alive keeps its id unique.

    def launched(self, call, work, _tensors) -> None:
        unit = self._unit_of(call.payload_bytes / self.itemsize)
        if unit is not None and call.op != "recv":
            self.events.append(Event("launch", unit))
        if unit is not None:
            self._works[id(work)] = work, unit

    def _unit_of(self, numel: float) -> int | None:
        near = [
            unit
            for unit, own in enumerate(self.numels)
            if min(abs(numel - own), abs(numel - own / self.world_size)) <= self.world_size
        ]
        return near[0] if near else None

    def waited(self, work_id, _began) -> None:
        if work_id in self._works:
            self.events.append(Event("wait", self._works[work_id][1]))

    def passed(self, kind: str, unit: int) -> None:
        self.events.append(Event(kind, unit))


def probe_order(wrapper, plan: UnitPlan, numels: list[int], seed: int, x, y) -> list[list[Event]]:
    """Return what happened, per step."""
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x, y = x.to(device_here()), y.to(device_here())
    found = []
    for _ in range(STEPS):
        log = Log(numels, plan.dtype.itemsize, torch.distributed.get_world_size())
        module.passed = log.passed
        with completion.watching(log), instrumentation.listening(log.launched, log.waiting):
            take_step(wrapped, optimizer, plan, x, y)
        module.passed = None
        found.append(log.events)
    return found


def numels_of_units() -> list[int]:
    return [sum(part.computed.numbers for part in unit) for unit in layout_of(MODEL).units]


def _try(attempt: Attempt, prefetch: int) -> tuple[list[list[list[Event]]], int]:
    """Return what happened, per rank and step, and how many units there are."""
    plan, numels = UnitPlan(MODEL, options={"prefetch": prefetch}), numels_of_units()
    return attempt.run(probe_order, plan, numels, per_rank=Draw(attempt).per_rank), len(numels)


def the_next_unit_is_in_flight(attempt: Attempt, keeps_last: bool = False) -> None:
    """Judge prefetching, also of a wrapper whose last unit stays unsharded between its forward and its backward."""
    for prefetch in (1, 2):
        found, units = _try(attempt, prefetch)
        for rank, steps in enumerate(found):
            for number, events in list(enumerate(steps, 1))[1:]:  # In the first forward, the order is not known yet.
                context = f"prefetch={prefetch}, step {number}"
                judge_step(rank, events, units, prefetch, context, keeps_last=keeps_last)


def judge_step(
    rank: int,
    events: list[Event],
    units: int,
    prefetch: int,
    context: str,
    phases: tuple[str, ...] = tuple(_HOOKS),
    keeps_last: bool = False,
) -> None:
    """Check that each unit but the first is launched while the unit `prefetch` positions before it computes.

    Raises:
        Wrong: If one is not.
    """
    _judge_begin(rank, events, units, context)
    if events.index(Event("launch", 0)) < events.index(Event("forward", 0)):
        evidence = (
            f"{context}, in forward: the all-gather of block 0 is launched before the root computes; expected "
            "it while the root computes"
        )
        hint = "Hint: for which units does pre_forward() call the prefetcher, and should the root be one of them?"
        raise Wrong({rank: evidence}, hint)
    for phase, order in (each for each in _orders(units) if each[0] in phases):
        if phase == "backward":
            _judge_turn(rank, events, order[0], context)
        for index, unit in enumerate(order[1:], 1):
            before, entered = order[index - 1], events.index(Event(phase, unit))
            launched = _first(events, Event("launch", unit), _begin_of(events, phase, order))
            here = f"{context}, in {phase}: the all-gather of block {unit}"
            if launched is None or launched > entered:
                evidence = f"{here} is not in flight when block {before} has finished"
                hint = "Hint: which unit comes next, and when do you know that?"
                if phase == "backward":
                    hint = "Hint: which unit comes next in backward, and which method of the prefetcher launches it?"
                raise Wrong({rank: evidence}, hint)
            launched_before = _first(events, Event("launch", before), _begin_of(events, phase, order))
            is_kept = keeps_last and phase == "backward" and before == order[0]  # Only its gradients are sent.
            if launched_before is not None and launched < launched_before and not is_kept:
                evidence = f"{here} is launched before that of block {before}, which computes first"
                hint = (
                    f"Hint: in {_HOOKS[phase]}, which line launches the all-gather of block {before}, and what is in "
                    "flight by then?"
                )
                raise Wrong({rank: evidence}, hint)
            waited = _first(events, Event("wait", unit), launched)
            if waited is not None and waited < entered:
                evidence = f"{context}, in {phase}: this rank waits for block {unit} before block {before} has finished"
                raise Wrong({rank: evidence}, "Hint: which unit needs these parameters, and when?")
            latest = order[max(1, index - prefetch + 1)]
            if launched > events.index(Event(phase, latest)):
                evidence = f"{here} is not in flight when block {latest} is about to compute"
                raise Wrong({rank: evidence}, "Hint: how many units ahead should be launched?")
            first = order[max(0, index - prefetch)]
            if first != order[0] and launched < events.index(Event(phase, first)):
                evidence = f"{here} is launched before block {first} computes"
                raise Wrong({rank: evidence}, "Hint: how many units ahead should be launched?")


def _judge_begin(rank: int, events: list[Event], units: int, context: str) -> None:
    """Judge that forward does not begin with a collective for every block, as it does if it reduces gradients."""
    begin = events[: events.index(Event("forward", 0))]
    if len({event.unit for event in begin if event.kind == "launch"}) == units:
        evidence = f"{context}, in forward: a collective of every block is launched before block 0 computes"
        hint = "Hint: which line launches them, one of a unit's hooks or one of forward()? And should it run now?"
        raise Wrong({rank: evidence}, hint)


def _judge_turn(rank: int, events: list[Event], last: int, context: str) -> None:
    """Judge that the last block is not all-gathered for backward before backward reaches it."""
    between = events[events.index(Event("forward", last)) : events.index(Event("backward", last))]
    if Event("launch", last) in between:
        evidence = f"{context}: the all-gather of block {last} for backward is launched before backward reaches it"
        hint = "Hint: which method of the prefetcher should pre_backward() call? What does it do for the root?"
        raise Wrong({rank: evidence}, hint)


def nothing_is_launched_ahead(attempt: Attempt) -> None:
    """Judge prefetch=0: an all-gather is launched only when the previous unit has finished."""
    found, units = _try(attempt, 0)
    for rank, steps in enumerate(found):
        for number, events in enumerate(steps, 1):
            _judge_begin(rank, events, units, f"prefetch=0, step {number}")
            for phase, order in _orders(units):
                for before, unit in pairwise(order):
                    launched = _first(events, Event("launch", unit), _begin_of(events, phase, order))
                    if launched is not None and launched < events.index(Event(phase, unit)):
                        context = f"prefetch=0, step {number}, in {phase}: the all-gather of block {unit} is launched"
                        hint = "Hint: how many units ahead does prefetch=0 allow?"
                        raise Wrong({rank: f"{context} before block {before} has finished"}, hint)


def _orders(units: int) -> list[tuple[str, list[int]]]:
    forwards = list(range(units))
    return [("forward", forwards), ("backward", forwards[::-1])]


def _begin_of(events: list[Event], phase: str, order: list[int]) -> int:
    """Find where a phase begins: backward begins after the last block has computed."""
    return 0 if phase == "forward" else events.index(Event("backward", order[0]))


def _first(events: list[Event], wanted: Event, begin: int) -> int | None:
    return next((index for index in range(begin, len(events)) if events[index] == wanted), None)
