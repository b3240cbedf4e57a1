"""Judge Prefetcher, with units that only log when unshard() is called."""

import contextlib
from dataclasses import dataclass, field

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong

_NOT_IN_LIST = "is not in list\n(This was "  # the error of list.index(), and the beginning of its note
HINTS_ON_ERRORS = {
    f"{_NOT_IN_LIST}in_forward": "In the first forward, `expected` is empty. Hint: when is the unit in it?",
    f"{_NOT_IN_LIST}in_backward": "Hint: what should in_backward() do for a unit that is not in `called`?",
}


class LoggedUnit:  # Students see this name in error messages.
    """Stand in for a Unit, with unshard() only."""

    def __init__(self, number: int, log: list[int]):
        self.number, self.log = number, log

    def __repr__(self) -> str:
        return f"unit {self.number}"

    def __getattr__(self, name: str):
        raise AttributeError(f"a unit in this check has only unshard(); it has no {name}")

    def unshard(self) -> None:
        self.log.append(self.number)


@dataclass(frozen=True)
class Pass:
    """Describe a forward that calls units in some order, and an optional backward that may not reach all of them."""

    called: tuple[int, ...]
    backward: bool = True
    unreached: tuple[int, ...] = ()


@dataclass
class Seen:
    """On which units unshard() was called in a pass, at each call in forward and in backward."""

    forward: list[list[int]] = field(default_factory=list)
    backward: list[list[int]] = field(default_factory=list)
    changes_called: bool = False  # whether in_backward() has changed the list `called`


def probe_prefetcher(prefetcher_class, units_ahead: int, count: int, passes: list[Pass]) -> list[Seen]:
    """Return what was seen in each pass."""
    log: list[int] = []
    units = [LoggedUnit(number, log) for number in range(count)]
    prefetcher, found = prefetcher_class(units_ahead), []
    for each in passes:
        prefetcher.begin_forward()
        seen = Seen()
        for unit in (units[number] for number in each.called):
            log.clear()
            with _noting("in_forward", unit):
                prefetcher.in_forward(unit)
            seen.forward.append(log[:])
        unreached = [units[number] for number in each.unreached]
        for unit in (units[number] for number in reversed(each.called)) if each.backward else ():
            if unit in unreached:
                continue
            log.clear()
            called = _called(prefetcher)
            with _noting("in_backward", unit):
                prefetcher.in_backward(unit, *[unreached] * bool(unreached))  # the argument may be left out
            seen.backward.append(log[:])
            seen.changes_called |= _called(prefetcher) != called
        found.append(seen)
    return found


@contextlib.contextmanager
def _noting(method: str, unit: LoggedUnit):
    """Add a note to an error: which call raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(This was {method}({unit}).)")
        raise


def _called(prefetcher) -> list:
    return list(getattr(prefetcher, "called", []))


def _judge(attempt: Attempt, units_ahead: int, passes: list[Pass]) -> None:
    count = 1 + max(number for each in passes for number in each.called)
    context = f"units_ahead={units_ahead}"
    found = attempt.run(probe_prefetcher, units_ahead, count, passes, context=context)[0]
    expected: tuple[int, ...] = ()
    for number, (each, seen) in enumerate(zip(passes, found, strict=True), 1):
        ahead = []
        for index in range(len(each.called)):
            same = each.called[: index + 1] == expected[: index + 1]
            ahead.append(list(expected[index + 1 :][:units_ahead]) if same else [])
        calls = [f"calls {list(each.called)}", f"after one that called {list(expected)}" if expected else "the first"]
        _judge_pass(f"{context}, forward {number}, which {', '.join(calls)}", each.called, ahead, seen.forward)
        if each.backward:
            reached = [unit for unit in reversed(each.called) if unit not in each.unreached]
            ahead = [reached[index + 1 :][:units_ahead] for index in range(len(reached))]
            unreached = f", and does not reach {list(each.unreached)}" if each.unreached else ""
            backward_context = f"{context}, the backward of a forward that called {list(each.called)}{unreached}"
            try:
                _judge_pass(backward_context, reached, ahead, seen.backward)
            except Wrong as wrong:
                if seen.changes_called:
                    evidence = f"{wrong.evidence}. in_backward() has changed the list self.called"
                    raise Wrong(evidence, "Hint: which line changes the list itself instead of a copy?") from None
                raise
        expected = each.called


def _judge_pass(context: str, order, ahead: list[list[int]], seen: list[list[int]]) -> None:
    """Judge one forward or backward.

    Args:
        context: What was done.
        order: The units in the order in which they are called.
        ahead: The units that may be launched at each call, and must be in flight after it. A unit that was
            launched earlier need not be launched again.
        seen: The units that were launched at each call.
    """
    launched: set[int] = set()
    for unit, allowed, newly_launched in zip(order, ahead, seen, strict=True):
        launched |= set(newly_launched)
        if wrong := set(newly_launched) - set(allowed) - {unit}:
            hint = "Hint: which units come next, and how many of them may be launched ahead?"
            raise Wrong(f"{context}: at unit {unit}, unit {min(wrong)} is launched; expected {allowed or 'none'}", hint)
        if missing := [each for each in allowed if each not in launched]:
            hint = "Hint: where is this unit in the order, and which units are reached next?"
            raise Wrong(f"{context}: at unit {unit}, unit {missing[0]} is not launched, but should be", hint)
        launched.discard(unit)


def the_next_unit_is_launched(attempt: Attempt) -> None:
    """Judge from the second forward on, because the order is not known in the first one."""
    for units_ahead in (1, 2, 0):
        order = tuple(attempt.random.sample(range(4), 4))
        _judge(attempt, units_ahead, [Pass(order, backward=False)] * 3)


def a_changed_order_stops_it(attempt: Attempt) -> None:
    for units_ahead in (1, 2):
        _judge(attempt, units_ahead, [Pass((0, 1, 2, 3), False), Pass((0, 2, 1, 3), False), Pass((0, 2, 1, 3), False)])
        _judge(attempt, units_ahead, [Pass((0, 1, 2), False), Pass((0, 1, 2, 3), False), Pass((1, 2), False)])
        _judge(attempt, units_ahead, [Pass((0, 1, 2, 3), False), Pass((1, 0, 2, 3), False)])  # 2 is third in both


def backward_is_prefetched_in_reverse(attempt: Attempt) -> None:
    for units_ahead in (1, 2, 0):
        first, second = (tuple(attempt.random.sample(range(4), 4)) for _ in range(2))
        _judge(attempt, units_ahead, [Pass(first), Pass(second)])
        _judge(attempt, units_ahead, [Pass((0, 1, 2, 3, 4), unreached=(0, 2))] * 2)
    _judge_earlier_forward(attempt)


def probe_earlier_forward(prefetcher_class) -> list[int]:
    """Call in_backward() for a unit of the previous forward. Return on which units unshard() was called."""
    log: list[int] = []
    units = [LoggedUnit(number, log) for number in range(3)]
    prefetcher = prefetcher_class(1)
    for called in (units, units[:2]):
        prefetcher.begin_forward()
        for unit in called:
            prefetcher.in_forward(unit)
    log.clear()
    with _noting("in_backward", units[2]):
        prefetcher.in_backward(units[2])
    return log


def _judge_earlier_forward(attempt: Attempt) -> None:
    context = "in_backward() of a unit that only an earlier forward has called"
    found = attempt.run(probe_earlier_forward, context=context)[0]
    if found:
        raise Wrong(
            f"{context} launches unit {found[0]}; expected none", "Hint: in which list do you look up the unit?"
        )
