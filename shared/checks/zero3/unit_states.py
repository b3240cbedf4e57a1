"""Judging Unit: which of its calls gather, wait and free, in which state. Its parts carry nothing, and keep a diary."""

from shared.checks.engine.framework import Attempt, Wrong

CALLS = ("begin_gather", "wait", "reshard", "into BACKWARD")
CERTAIN = (  # whatever else is drawn
    ["begin_gather", "wait", "into BACKWARD", "begin_gather", "wait", "reshard", "reshard", "wait"],
    ["begin_gather", "reshard", "begin_gather", "begin_gather", "wait", "wait", "begin_gather"],
)


class Part:  # its name stands in the errors that a student reads
    """What a unit gathers and frees."""

    def __init__(self, number: int, diary: list[tuple]):
        self.number, self.diary = number, diary

    def __getattr__(self, name: str):
        raise AttributeError(f"a part in this check has gather() and free(), but no {name}")

    def gather(self) -> "Handle":
        self.diary.append(("gather", self.number))
        return Handle(self)

    def free(self) -> None:
        self.diary.append(("free", self.number))


class Handle:
    def __init__(self, part: Part):
        self.part = part

    def wait(self) -> None:
        self.part.diary.append(("wait", self.part.number))


def probe_unit(unit_class, parts: int, calls: list[str]) -> list[tuple[str, list[tuple]]]:
    """→ after each call, the state and what the parts were told"""
    diary: list[tuple] = []
    unit = unit_class([Part(number, diary) for number in range(parts)])
    states, found = type(unit.state), [(unit.state.name, [])]
    for call in calls:
        diary.clear()
        if call == "into BACKWARD":
            unit.state = states["BACKWARD"]
        else:
            getattr(unit, call)()
        found.append((unit.state.name, diary[:]))
    return found


def _tries(attempt: Attempt) -> list[tuple[list[str], list[tuple[str, list[tuple]]]]]:
    """→ per try: what was called; and for each call and before the first, the state and what the parts were told"""
    found = []
    for calls in (*CERTAIN, *(_draw_calls(attempt) for _ in range(4))):
        parts = attempt.random.randint(1, 3)
        context = f"a unit of {parts} part{'s' if parts > 1 else ''}: {_said(calls)}"
        found.append((calls, attempt.run(probe_unit, parts, calls, context=context)[0]))
    return found


def _draw_calls(attempt: Attempt) -> list[str]:
    calls, state = [], "SHARDED"
    for _ in range(attempt.random.randint(5, 9)):
        call = attempt.random.choice(CALLS if state == "GATHERED" else CALLS[:3])
        calls.append(call)
        state = _after(call, state)
    return calls


def _after(call: str, state: str) -> str:
    if call == "begin_gather":
        return "GATHERING" if state == "SHARDED" else state
    if call == "wait":
        return "GATHERED" if state in ("SHARDED", "GATHERING") else state
    return "SHARDED" if call == "reshard" else "BACKWARD"


def _said(calls: list[str]) -> str:
    return ", ".join(call if " " in call else f"{call}()" for call in calls)


def states_follow_the_table(attempt: Attempt) -> None:
    for calls, found in _tries(attempt):
        state = "SHARDED"
        for number, (call, (got, _)) in enumerate(zip(calls, found[1:], strict=True), 1):
            state = _after(call, state)
            if got != state:
                said = f"after {_said(calls[:number])}, the state is {got}; expected {state}"
                raise Wrong(said, "Look at: which row of the table is that, and from which state?")


def parts_are_told_once(attempt: Attempt) -> None:
    """Gathered once and all at a time, waited for once before anybody computes or frees, freed once."""
    for calls, found in _tries(attempt):
        state, waiting = "SHARDED", False
        for number, (call, (_, told)) in enumerate(zip(calls, found[1:], strict=True), 1):
            said = f"after {_said(calls[: number - 1]) or 'nothing'}, {_said([call])} did {_told(told)}"
            gathers = call in ("begin_gather", "wait") and state == "SHARDED"
            waits = (waiting or gathers) and call in ("wait", "reshard")
            frees = call == "reshard" and state != "SHARDED"
            _judge(told, {"gather": gathers, "wait": waits, "free": frees}, frees or call != "reshard", said)
            waiting = (waiting or gathers) and not waits
            state = _after(call, state)


_HINTS = {
    "gather": "Look at: in which state are the parameters here, or on their way?",
    "wait": "Look at: what is still under way, and who must not go on before it has arrived?",
    "free": "Look at: when do parts have memory to be given back?",
}


def _judge(told: list[tuple], expected: dict[str, bool], strictly: bool, said: str) -> None:
    """strictly: a second free() does nothing, so who reshards what is sharded may call it."""
    parts = {number for _, number in told}
    for verb, is_due in expected.items():
        numbers = [number for what, number in told if what == verb]
        if is_due and (not numbers or len(numbers) != len(set(numbers)) or set(numbers) != parts):
            raise Wrong(f"{said}; expected one {verb} of each part", _HINTS[verb])
        if numbers and not is_due and (strictly or verb != "free"):
            raise Wrong(f"{said}; expected no {verb}", _HINTS[verb])
    order = [("gather", "wait", "free").index(what) for what, _ in told]
    if order != sorted(order):
        raise Wrong(f"{said}, in this order", "Look at: what can travel at the same time, and whose memory may go?")


def _told(told: list[tuple]) -> str:
    return ", ".join(f"{verb} {number}" for verb, number in told) or "nothing"
