"""Judge a measurement with a simulated clock that only the measured calls advance, so that results are exact."""

import contextlib
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.wire import instrumentation

PARTS = ("forward", "backward", "finish_gradient_sync()")
CLOCK, BARRIER = "now_ms()", "dist.barrier()"
_EVEN = "The median of an even number of rounds is the mean of the two in the middle."


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, spend):
        ctx.spend = spend
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.spend()
        return gradient, None


class Event(NamedTuple):
    """A call of the measuring function or of autograd, by the name that a message uses for it."""

    what: str
    inside: bool  # no_sync()
    has_gradients: bool


class ScriptedModel(nn.Module):
    """Take as long as a script says on a simulated clock, and log every call. The model begins with gradients."""

    def __init__(self, script: list[dict[str, float]], between_ms: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.grad = torch.ones(2)
        self.script, self.between_ms = list(script), between_ms
        self.spent_ms, self.quiet, self.events = 0.0, 0, []

    def log(self, what: str) -> None:
        self.events.append(Event(what, self.quiet > 0, self.weight.grad is not None))

    def now_ms(self) -> float:
        self.log(CLOCK)
        return self.spent_ms

    def idle(self, what: str) -> None:
        """Advance the clock for a call that is not part of a step."""
        self.spent_ms += self.between_ms
        self.log(what)

    def _spend(self, part: str) -> None:
        if not self.script:
            raise AssertionError("communication_cost() measured more than 2 · (rounds + 1) steps")
        self.spent_ms += self.script[0][part]
        self.log(part)
        if part == PARTS[-1]:
            self.script.pop(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._spend("forward")
        return _Backward.apply((inputs * self.weight).sum(), lambda: self._spend("backward"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.idle("zero_grad()")

    def finish_gradient_sync(self) -> None:
        self._spend("finish_gradient_sync()")

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1


@dataclass
class Measured:
    result: tuple[float, ...]
    events: list[tuple]  # the fields of each Event
    calls: list[instrumentation.Call]


def probe_cost(communication_cost, script, between_ms: float, rounds: int | None) -> Measured:
    model = ScriptedModel(script, between_ms)

    def on_launch(call, _work, _tensors) -> None:
        model.idle(BARRIER if call.op == "barrier" else call.op)

    further = () if rounds is None else (rounds,)
    with instrumentation.listening(launched=on_launch) as calls:
        result = communication_cost(model, lambda given: given(torch.ones(2)), model.now_ms, *further)
    events = list(map(tuple, model.events))  # A result may contain no classes of the student's own.
    return Measured(tuple(map(float, result)), events, calls)


def _draw_script(attempt: Attempt, rounds: int, extra_ms: int) -> tuple[list[dict[str, float]], list, list]:
    """Draw how long everything takes. Return the script, and ms per round without and with communication.

    Times are multiples of 1/64 ms: sums are exact, and two different mistakes hardly ever give the same result. Some
    rounds are slow as a whole, so the median of differences is not the difference of medians.

    Args:
        attempt: The run of the check.
        rounds: How many rounds count.
        extra_ms: By how much communication lengthens each part of a step.
    """
    script, alone, together = [], [], []
    for turn in range(rounds + 1):
        slow_ms = attempt.random.randint(0, 60 * 64) / 64
        for times, more_ms in ((alone, 0), (together, extra_ms)):
            drawn_ms = {part: attempt.random.randint(31 * 64, 50 * 64) / 64 for part in PARTS}
            step = {part: part_ms + more_ms + slow_ms + 100.0 * (turn == 0) for part, part_ms in drawn_ms.items()}
            script.append(step)
            times.append(sum(step.values()))
    return script, alone, together


def _run(attempt: Attempt, rounds: int | None, extra_ms: int = 20):
    script, alone, together = _draw_script(attempt, rounds or 10, extra_ms)
    between_ms = float(attempt.random.randint(30, 60))
    return attempt.run(probe_cost, script, between_ms, rounds), alone, together


def medians_are_exact(attempt: Attempt) -> None:
    """In the last case, the steps with communication are the faster ones, as they may be where it costs little.

    If several known mistakes give the result of a case, the next case may tell which one it is.
    """
    unclear = None
    for rounds, extra_ms in ((5, 20), (4, 20), (1, 20), (3, -20)):
        found, alone, together = _run(attempt, rounds, extra_ms)
        expected = statistics.median(alone[1:]), _median_difference(alone[1:], together[1:])
        for rank, result in enumerate(found):
            if not _same(result.result, expected):
                actual = ", ".join(f"{value:g}" for value in result.result)
                evidence = (
                    f"{rounds} rounds: compute_ms, exposed_ms = {actual}; expected {expected[0]:g}, {expected[1]:g}"
                )
                hints = _causes(result.result, alone, together)
                if len(hints) == 1:
                    raise Wrong({rank: evidence}, hints[0])
                unclear = unclear or Wrong({rank: evidence}, hints[0])
    if unclear:
        raise unclear


def _median_difference(shorter: list[float], longer: list[float], median=statistics.median) -> float:
    return median(more - less for less, more in zip(shorter, longer, strict=True))


def _same(actual: tuple, expected: tuple) -> bool:
    return all(abs(one - other) < 1e-6 for one, other in zip(actual, expected, strict=True))


def _causes(actual: tuple, alone: list[float], together: list[float]) -> list[str]:
    """Return the hints on all common mistakes that give this result, or one hint if there are none."""
    median, mean, low, high = statistics.median, statistics.fmean, statistics.median_low, statistics.median_high
    first, second = median(alone[1:]), median(together[1:])
    exposed = _median_difference(alone[1:], together[1:])
    warm_up = "Hint: which round is only a warm-up and must not count?"
    mean_hint = "This is the mean. Hint: how much does one slow round change a mean?"
    known = [
        (median(alone), _median_difference(alone, together), warm_up),
        (median(alone[:-1]), _median_difference(alone[:-1], together[:-1]), warm_up),
        (second, exposed, "Hint: which kind of step is compute_ms the median of?"),
        (mean(alone[1:]), mean(together[1:]) - mean(alone[1:]), mean_hint),
        (min(alone[1:]), _median_difference(alone[1:], together[1:], min), "These are minima; expected medians."),
        (min(alone[1:]), min(together[1:]) - min(alone[1:]), "These are the fastest steps; expected medians."),
        (first, second, "Hint: what remains of a step's time when you subtract the time without communication?"),
        (exposed, first, "These are exposed_ms and compute_ms. Hint: in which order do you return them?"),
        (high(alone[1:]), _median_difference(alone[1:], together[1:], high), _EVEN),
        (low(alone[1:]), _median_difference(alone[1:], together[1:], low), _EVEN),
    ]
    if hints := [hint for *values, hint in known if _same(actual, tuple(values))]:
        return list(dict.fromkeys(hints))
    if _same(actual, (first, second - first)):
        return ["This is the difference of the medians. Hint: from which rounds may the two medians come?"]
    if exposed < 0 and abs(actual[0] - first) < 1e-6:
        return ["Hint: what does your function return if the steps with communication are the faster ones?"]
    return ["Hint: which calls are between the two readings of the clock, and which come before the first?"]


def every_step_is_measured_alike(attempt: Attempt) -> None:
    found, _, _ = _run(attempt, None)
    for rank, result in enumerate(found):
        events = [Event(*event) for event in result.events]
        counts = {part: sum(event.what == part for event in events) for part in PARTS}
        if len(set(counts.values())) > 1:
            called = ", ".join(f"{part} {count}" for part, count in counts.items())
            evidence = f"with the default of 10 rounds, these calls were counted: {called}; expected 22 of each"
            raise Wrong({rank: evidence}, "Hint: which of these calls is missing in some of the steps?")
        if counts["forward"] != 22:
            evidence = f"with the default of 10 rounds, {counts['forward']} steps were measured; expected 22"
            raise Wrong({rank: evidence}, "Each round measures two steps. The warm-up is one more round.")
        if any(call.op != "barrier" for call in result.calls):
            raise Wrong({rank: f"communication_cost() launched {describe_calls(result.calls)}; expected only barriers"})
        _judge_steps(rank, events)


def _judge_steps(rank: int, events: list[Event]) -> None:
    """Require of each step: gradients that are None, a barrier, and no_sync() around all or none of its parts.

    The clock must be read right before forward and right after finish_gradient_sync().
    """
    first, *_, last = PARTS
    parts = {part: [index for index, event in enumerate(events) if event.what == part] for part in PARTS}
    for number, (begin, start, end) in enumerate(zip([0, *parts[first]], parts[first], parts[last], strict=False), 1):
        context = f"measurement {number}"
        before = [event.what for event in events[begin:start]]
        if events[start].has_gradients:
            earlier = "" if number > 1 else " that the model had before the call"
            evidence = f"{context} begins with gradients{earlier}; expected None"
            raise Wrong({rank: evidence}, "Hint: what does backward() add its gradients to?")
        if BARRIER not in before[-before[::-1].index(last) if last in before else 0 :]:
            raise Wrong(
                {rank: f"{context} begins without a barrier"},
                "Hint: without a barrier, which ranks would wait for which inside the measured time?",
            )
        if before[-1] != CLOCK:
            raise Wrong({rank: f"{context}: the last call before {first} is {before[-1]}; expected {CLOCK}"})
        _judge_no_sync(rank, number, {part: events[parts[part][number - 1]].inside for part in PARTS})
        after = events[end + 1].what if end + 1 < len(events) else "missing"
        if after != CLOCK:
            raise Wrong({rank: f"{context}: the first call after {last} is {after}; expected {CLOCK}"})


def _judge_no_sync(rank: int, number: int, inside: dict[str, bool]) -> None:
    """Require that all parts of a step run inside no_sync() if its number is odd, and outside if it is even."""
    context, expected = f"measurement {number}", number % 2 == 1
    where = {True: "inside", False: "outside"}
    wrong, right = ([part for part in PARTS if (inside[part] == expected) == good] for good in (False, True))
    if wrong and right:
        evidence = (
            f"{context} runs {' and '.join(wrong)} {where[not expected]} no_sync(), but {' and '.join(right)} "
            f"{where[expected]}; expected all of them {where[expected]}"
        )
        raise Wrong({rank: evidence}, "Hint: which lines belong to the block of `with model.no_sync():`?")
    if wrong:
        previous = f", like measurement {number - 1}" if number > 1 else ""
        evidence = f"{context} runs {where[not expected]} no_sync(){previous}; expected inside and outside in turn"
        raise Wrong({rank: f"{evidence}, inside first"})
