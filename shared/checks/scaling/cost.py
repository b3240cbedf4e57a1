"""Judging a measurement with a clock that only the measured things move: what comes out is exact."""

import contextlib
import statistics

import torch
from torch import nn

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Attempt, Wrong
from shared.wire import instrumentation

PARTS = ("forward", "backward", "finish")
_EVEN = "Of an even number of rounds, the median is the mean of the two in the middle."


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, spend):
        ctx.spend = spend
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.spend()
        return gradient, None


class ScriptedModel(nn.Module):
    """Takes as long as it is told to, and writes down what is done with it. events: (what, ms on its clock)"""

    def __init__(self, script: list[dict[str, float]], between_ms: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.script, self.between_ms = list(script), between_ms
        self.spent_ms, self.quiet, self.events = 0.0, 0, []

    def now_ms(self) -> float:
        self.events.append(("clock", ""))
        return self.spent_ms

    def idle(self, what: str) -> None:
        """What is no part of a step takes time too."""
        self.spent_ms += self.between_ms
        self.events.append((what, ""))

    def _spend(self, part: str) -> None:
        if not self.script:
            raise AssertionError("more steps than 2 (rounds + 1) were measured")
        self.spent_ms += self.script[0][part]
        grad = "" if self.weight.grad is None else "with gradients"
        self.events.append((part, grad if part == "forward" else "in no_sync" if self.quiet else ""))
        if part == "forward":
            self.events.append(("kind", "in no_sync" if self.quiet else ""))
        if part == "finish":
            self.script.pop(0)

    def forward(self) -> torch.Tensor:
        self._spend("forward")
        return _Backward.apply(self.weight.sum(), lambda: self._spend("backward"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.idle("zero_grad")

    def finish_gradient_sync(self) -> None:
        self._spend("finish")

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1


def probe_cost(communication_cost, script, between_ms: float, rounds: int | None) -> dict:
    model = ScriptedModel(script, between_ms)

    def heard(call, _work, _tensors) -> None:
        model.idle("barrier" if call.op == "barrier" else "message")

    further = () if rounds is None else (rounds,)
    with instrumentation.listening(launched=heard) as calls:
        result = communication_cost(model, lambda given: given(), model.now_ms, *further)
    return {"result": tuple(map(float, result)), "events": model.events, "calls": calls, "left": len(model.script)}


def _draw_script(attempt: Attempt, rounds: int) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """Draw how long everything takes. → the script, alone and in messages' company: ms per round"""
    script, alone, together = [], [], []
    for turn in range(rounds + 1):
        for times, extra_ms in ((alone, 0), (together, 7)):
            step = {part: attempt.random.randint(1, 20) + extra_ms + 100.0 * (turn == 0) for part in PARTS}
            script.append(step)
            times.append(sum(step.values()))
    return script, alone, together


def _run(attempt: Attempt, rounds: int | None):
    script, alone, together = _draw_script(attempt, rounds or 10)
    between_ms = float(attempt.random.randint(30, 60))
    return attempt.run(probe_cost, script, between_ms, rounds), alone, together


def medians_are_exact(attempt: Attempt) -> None:
    for rounds in (5, 4, 1):
        found, alone, together = _run(attempt, rounds)
        compute_ms = statistics.median(alone[1:])
        want = (compute_ms, statistics.median(together[1:]) - compute_ms)
        for rank, result in enumerate(found):
            if any(abs(one - other) > 1e-6 for one, other in zip(result["result"], want, strict=True)):
                came = ", ".join(f"{value:g}" for value in result["result"])
                said = f"{rounds} rounds: compute_ms, exposed_ms are {came}; expected {want[0]:g}, {want[1]:g}"
                raise Wrong({rank: said}, _cause(result["result"], alone, together))


def _cause(came: tuple, alone: list[float], together: list[float]) -> str:
    """Recognise the usual mistakes by what they would have measured."""
    median, mean, low, high = statistics.median, statistics.fmean, statistics.median_low, statistics.median_high
    first, second = median(alone[1:]), median(together[1:])
    known = {
        (median(alone), median(together) - median(alone)): "Look at: which rounds warm up?",
        (mean(alone[1:]), mean(together[1:]) - mean(alone[1:])): "It is the mean. What does one slow round do to it?",
        (first, second): "Look at: what is left of a step when that without messages is taken off?",
        (first, median(b - a for a, b in zip(alone[1:], together[1:], strict=True))): (
            "It is the median of the differences, not the difference of the medians."
        ),
        (high(alone[1:]), high(together[1:]) - high(alone[1:])): _EVEN,  # last: what warms up can give the same
        (low(alone[1:]), low(together[1:]) - low(alone[1:])): _EVEN,
    }
    for values, hint in known.items():
        if all(abs(one - other) < 1e-6 for one, other in zip(came, values, strict=True)):
            return hint
    return "Look at: what exactly lies between the two readings of the clock, and what is done before the first?"


def each_measurement_starts_equal(attempt: Attempt) -> None:
    found, _, _ = _run(attempt, None)
    for rank, result in enumerate(found):
        if result["left"]:
            said = f"with 10 rounds by default, {22 - result['left']} steps were measured; expected 22"
            raise Wrong({rank: said}, "Each round has two steps, and one round more than counts is measured.")
        if any(call.op != "barrier" for call in result["calls"]):
            raise Wrong({rank: f"{describe_calls(result['calls'])}; expected barriers and nothing else"})
        _judge_steps(rank, result["events"])


def _judge_steps(rank: int, events: list[tuple[str, str]]) -> None:
    """Before each forward: gradients None, a barrier, and then the clock."""
    starts = [place for place, (what, _) in enumerate(events) if what == "forward"]
    for number, (begin, place) in enumerate(zip([0, *starts], starts, strict=False), 1):
        said = f"measurement {number}"
        before = [what for what, _ in events[begin:place]]
        if events[place][1]:
            raise Wrong(
                {rank: f"{said} begins with the gradients of the last"}, "Look at: what does backward() add to?"
            )
        if "barrier" not in before[-before[::-1].index("finish") if "finish" in before else 0 :]:
            raise Wrong({rank: f"{said} begins without a barrier"}, "Look at: which ranks would wait for which?")
        if before[-1] != "clock":
            raise Wrong({rank: f"{said}: last before forward comes {before[-1]}; expected the clock"})
        quiet = bool(events[place + 1][1])
        if quiet != (number % 2 == 1):
            which = "inside" if quiet else "outside"
            raise Wrong({rank: f"{said} is {which} no_sync(); expected in turn, first inside"})
    finishes = [kind for what, kind in events if what == "finish"]
    for number, kind in enumerate(finishes, 1):
        if bool(kind) != (number % 2 == 1):
            which = "inside" if kind else "outside"
            raise Wrong({rank: f"measurement {number} finishes {which} no_sync(), but does not begin there"})
