"""Judge Unit: which of its methods launch, wait and free, and in which states.

The flat parameters of these checks send nothing. They only log their calls.
"""

from dataclasses import dataclass
from unittest import mock

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong

CALLS = ("unshard", "wait_for_unshard", "reshard", "state = BACKWARD")
PLAIN = ["unshard", "wait_for_unshard", "reshard", "wait_for_unshard", "reshard"]
CERTAIN = (  # sequences that are always tried, besides random ones
    ["unshard", "wait_for_unshard", "state = BACKWARD", "unshard", "wait_for_unshard", "reshard", "reshard"],
    ["wait_for_unshard", "state = BACKWARD", "wait_for_unshard", "reshard", "wait_for_unshard"],
    ["unshard", "reshard", "unshard", "unshard", "wait_for_unshard", "wait_for_unshard", "unshard"],
)


class LoggedFlatParameter:  # Students see this name in error messages.
    """Stand in for a ShardedFlatParameter, and log each call."""

    def __init__(self, number: int, log: list[tuple]):
        self.number, self.log = number, log

    def __getattr__(self, name: str):
        raise AttributeError(f"a flat parameter in this check has only unshard() and reshard(); it has no {name}")

    def unshard(self) -> "Handle":
        self.log.append(("unshard", self.number))
        return Handle(self)

    def reshard(self) -> None:
        self.log.append(("reshard", self.number))


class Handle:
    def __init__(self, flat_parameter: LoggedFlatParameter):
        self.flat_parameter = flat_parameter

    def wait(self) -> None:
        self.flat_parameter.log.append(("wait", self.flat_parameter.number))


@dataclass(frozen=True)
class Found:
    """What a call of a unit's method has left: the state, the calls of the flat parameters, and handles in `works`."""

    state: str
    log: list[tuple]
    handles: int


def probe_unit(unit_class, count: int, calls: list[str]) -> list[Found]:
    """Return what was found before the first call and after each."""
    log: list[tuple] = []
    unit = unit_class([LoggedFlatParameter(number, log) for number in range(count)])
    states, found = type(unit.state), [_look(unit, log)]
    logged = {"unshard": LoggedFlatParameter.unshard, "reshard": LoggedFlatParameter.reshard}
    sharded = unit_class.reshard.__globals__.get("ShardedFlatParameter", LoggedFlatParameter)
    with mock.patch.multiple(sharded, **logged):  # a unit may call ShardedFlatParameter.reshard(flat_parameter)
        for call in calls:
            log.clear()
            if call == "state = BACKWARD":
                unit.state = states.BACKWARD
            else:
                getattr(unit, call)()
            found.append(_look(unit, log))
    return found


def _look(unit, log: list[tuple]) -> Found:
    return Found(unit.state.name, log[:], len(getattr(unit, "works", None) or ()))  # a unit may keep them elsewhere


def _try(attempt: Attempt, calls: list[str]) -> list[Found]:
    """Call the methods of a unit. Return what was found before the first call and after each."""
    # A unit of one flat parameter cannot show in which order several are gathered, so CERTAIN never draws one.
    count = attempt.random.randint(2 if calls in CERTAIN else 1, 3)
    context = f"a unit of {count} flat parameter{'s' if count > 1 else ''}: {_describe_calls(calls)}"
    return attempt.run(probe_unit, count, calls, context=context)[0]


def _sequences(attempt: Attempt) -> list[list[str]]:
    return [*CERTAIN, *(_draw_calls(attempt) for _ in range(4))]


def _draw_calls(attempt: Attempt) -> list[str]:
    calls, state = [], "SHARDED"
    for _ in range(attempt.random.randint(5, 9)):
        call = attempt.random.choice(CALLS if state == "UNSHARDED" else CALLS[:3])
        calls.append(call)
        state = _after(call, state)
    return calls


def _after(call: str, state: str) -> str:
    if call == "unshard":
        return "UNSHARDING" if state == "SHARDED" else state
    if call == "wait_for_unshard":
        return "UNSHARDED" if state in ("SHARDED", "UNSHARDING") else state
    return "SHARDED" if call == "reshard" else "BACKWARD"


def _describe_calls(calls: list[str]) -> str:
    return ", ".join(call if " " in call else f"{call}()" for call in calls)


def forward_unshards_and_reshards(attempt: Attempt) -> None:
    """Unshard, compute and reshard, twice."""
    found = _try(attempt, PLAIN)
    _judge_states(PLAIN, found)
    _judge_work(PLAIN, found)


def states_follow_the_table(attempt: Attempt) -> None:
    for calls in _sequences(attempt):
        _judge_states(calls, _try(attempt, calls))


def _judge_states(calls: list[str], found: list[Found]) -> None:
    state = "SHARDED"
    for number, (call, after) in enumerate(zip(calls, found[1:], strict=True), 1):
        state = _after(call, state)
        if after.state != state:
            evidence = f"after {_describe_calls(calls[:number])}: the state is {after.state}; expected {state}"
            raise Wrong(evidence, _HINT_ON_STATES)


def work_is_done_once(attempt: Attempt) -> None:
    """Require that all-gathers are launched together, waited for once before computing or freeing, and freed once.

    A handle that has been waited for must not be kept.
    """
    for calls in _sequences(attempt):
        _judge_work(calls, _try(attempt, calls))


def _judge_work(calls: list[str], found: list[Found]) -> None:
    state, in_flight = "SHARDED", False
    for number, (call, after) in enumerate(zip(calls, found[1:], strict=True), 1):
        when = f"after {_describe_calls(calls[: number - 1])}" if number > 1 else "on a new unit"
        context = f"{when}: {_describe_calls([call])} did {_describe_log(after.log)}"
        launches = call in ("unshard", "wait_for_unshard") and state == "SHARDED"
        waits = (in_flight or launches) and call in ("wait_for_unshard", "reshard")
        frees = call == "reshard" and state != "SHARDED"
        due = {"unshard": launches, "wait": waits, "reshard": frees}
        _judge_log(after.log, due, frees or call != "reshard", context)
        in_flight = (in_flight or launches) and not waits
        state = _after(call, state)
        if after.handles and not in_flight:
            evidence = f"after {_describe_calls(calls[:number])}: all all-gathers are complete, but self.works holds"
            evidence = f"{evidence} {after.handles} handle{'s' if after.handles > 1 else ''}; expected none"
            raise Wrong(evidence, _HINT_ON_HANDLES)


_HINT_ON_STATES = "Hint: which row of the table describes this call?"
_HINTS = {
    "unshard": "Hint: how many flat parameters does the unit have, and which method launches their all-gathers?",
    "wait": "Hint: what is still in flight, and which method must not continue before it is complete?",
    "reshard": "Hint: when do the flat parameters have memory that can be freed?",
}
_HINT_ON_HANDLES = "A second wait for the same handle can hang. Hint: from when on is a handle no longer needed?"
_HINT_ON_EXTRA_WAITS = "Hint: which methods wait, and which handles are still in self.works at this moment?"


def _judge_log(log: list[tuple], due: dict[str, bool], strictly: bool, context: str) -> None:
    """Judge the calls of the flat parameters.

    Args:
        log: The calls, as (name, index of the flat parameter).
        due: For each name, whether it must be called.
        strictly: Whether to reject a reshard() that is not due; it does nothing, so it may be harmless.
        context: What was done.
    """
    logged_numbers = {number for _, number in log}
    for verb, is_due in due.items():
        numbers = [number for what, number in log if what == verb]
        repeats = len(numbers) != len(set(numbers))
        hint = _HINT_ON_EXTRA_WAITS if verb == "wait" and numbers and (repeats or not is_due) else _HINTS[verb]
        if is_due and (not numbers or repeats or set(numbers) != logged_numbers):
            raise Wrong(f"{context}; expected one {verb}() of each flat parameter", hint)
        if numbers and not is_due and (strictly or verb != "reshard"):
            hint = _HINT_ON_STATES if verb == "unshard" else hint
            raise Wrong(f"{context}; expected no {verb}()", hint)
    order = [("unshard", "wait", "reshard").index(what) for what, _ in log]
    if order != sorted(order):
        raise Wrong(
            f"{context}; expected unshard() before wait() before reshard()",
            "Hint: what can be in flight at the same time, and what may be freed?",
        )


def _describe_log(log: list[tuple]) -> str:
    return ", ".join(f"{verb}() of flat parameter {number}" for verb, number in log) or "nothing"
