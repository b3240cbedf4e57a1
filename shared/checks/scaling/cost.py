"""Judge a measurement with a simulated clock that only the measured calls advance, so that results are exact."""

import contextlib
import statistics

import torch
from torch import nn

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Attempt, Wrong
from shared.wire import instrumentation

PARTS = ("forward", "backward", "finish")
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


class ScriptedModel(nn.Module):
    """Take as long as a script says on a simulated clock, and log every call as an event (name, detail)."""

    def __init__(self, script: list[dict[str, float]], between_ms: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.script, self.between_ms = list(script), between_ms
        self.spent_ms, self.quiet, self.events = 0.0, 0, []

    def now_ms(self) -> float:
        self.events.append(("clock", ""))
        return self.spent_ms

    def idle(self, what: str) -> None:
        """Advance the clock for a call that is not part of a step."""
        self.spent_ms += self.between_ms
        self.events.append((what, ""))

    def _spend(self, part: str) -> None:
        if not self.script:
            raise AssertionError("communication_cost() measured more than 2 · (rounds + 1) steps")
        self.spent_ms += self.script[0][part]
        grad = "" if self.weight.grad is None else "with gradients"
        self.events.append((part, grad if part == "forward" else "in no_sync" if self.quiet else ""))
        if part == "forward":
            self.events.append(("kind", "in no_sync" if self.quiet else ""))
        if part == "finish":
            self.script.pop(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._spend("forward")
        return _Backward.apply((inputs * self.weight).sum(), lambda: self._spend("backward"))

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

    def on_launch(call, _work, _tensors) -> None:
        model.idle("barrier" if call.op == "barrier" else "message")

    further = () if rounds is None else (rounds,)
    with instrumentation.listening(launched=on_launch) as calls:
        result = communication_cost(model, lambda given: given(torch.ones(2)), model.now_ms, *further)
    return {"result": tuple(map(float, result)), "events": model.events, "calls": calls, "left": len(model.script)}


def _draw_script(attempt: Attempt, rounds: int) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """Draw how long everything takes. Return the script, and ms per round without and with communication."""
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
        expected = (compute_ms, statistics.median(together[1:]) - compute_ms)
        for rank, result in enumerate(found):
            if any(abs(one - other) > 1e-6 for one, other in zip(result["result"], expected, strict=True)):
                actual = ", ".join(f"{value:g}" for value in result["result"])
                evidence = (
                    f"{rounds} rounds: compute_ms, exposed_ms = {actual}; expected {expected[0]:g}, {expected[1]:g}"
                )
                raise Wrong({rank: evidence}, _cause(result["result"], alone, together))


def _cause(actual: tuple, alone: list[float], together: list[float]) -> str:
    """Recognize common mistakes by the result that they give."""
    median, mean, low, high = statistics.median, statistics.fmean, statistics.median_low, statistics.median_high
    first, second = median(alone[1:]), median(together[1:])
    known = {
        (median(alone), median(together) - median(alone)): "Hint: which round is only a warm-up and must not count?",
        (
            mean(alone[1:]),
            mean(together[1:]) - mean(alone[1:]),
        ): "This is the mean. Hint: how much does one slow round change a mean?",
        (first, second): "Hint: what remains of a step's time when you subtract the time without communication?",
        (first, median(b - a for a, b in zip(alone[1:], together[1:], strict=True))): (
            "This is the median of the differences; expected the difference of the medians."
        ),
        # The last two, because counting the warm-up can give the same result.
        (high(alone[1:]), high(together[1:]) - high(alone[1:])): _EVEN,
        (low(alone[1:]), low(together[1:]) - low(alone[1:])): _EVEN,
    }
    for values, hint in known.items():
        if all(abs(one - other) < 1e-6 for one, other in zip(actual, values, strict=True)):
            return hint
    return "Hint: which calls are between the two readings of the clock, and which come before the first?"


def every_measurement_starts_alike(attempt: Attempt) -> None:
    found, _, _ = _run(attempt, None)
    for rank, result in enumerate(found):
        if result["left"]:
            evidence = f"with the default of 10 rounds, {22 - result['left']} steps were measured; expected 22"
            raise Wrong({rank: evidence}, "Each round measures two steps, and one additional round warms up.")
        if any(call.op != "barrier" for call in result["calls"]):
            raise Wrong(
                {rank: f"communication_cost() launched {describe_calls(result['calls'])}; expected only barriers"}
            )
        _judge_steps(rank, result["events"])


def _judge_steps(rank: int, events: list[tuple[str, str]]) -> None:
    """Require, before each forward: gradients that are None, a barrier, and then a reading of the clock."""
    starts = [index for index, (what, _) in enumerate(events) if what == "forward"]
    for number, (begin, start) in enumerate(zip([0, *starts], starts, strict=False), 1):
        context = f"measurement {number}"
        before = [what for what, _ in events[begin:start]]
        if events[start][1]:
            evidence = f"{context} begins with the gradients of the previous measurement; expected None"
            raise Wrong({rank: evidence}, "Hint: what does backward() add its gradients to?")
        if "barrier" not in before[-before[::-1].index("finish") if "finish" in before else 0 :]:
            raise Wrong(
                {rank: f"{context} begins without a barrier"},
                "Hint: without a barrier, which ranks would wait for which inside the measured time?",
            )
        if before[-1] != "clock":
            raise Wrong(
                {rank: f"{context}: the last call before forward is {before[-1]}; expected a reading of the clock"}
            )
        quiet = bool(events[start + 1][1])
        if quiet != (number % 2 == 1):
            which = "inside" if quiet else "outside"
            raise Wrong({rank: f"{context} runs {which} no_sync(); expected inside and outside in turn"})
    finishes = [kind for what, kind in events if what == "finish"]
    for number, kind in enumerate(finishes, 1):
        if bool(kind) != (number % 2 == 1):
            which = "inside" if kind else "outside"
            raise Wrong(
                {rank: f"measurement {number} calls finish_gradient_sync() {which} no_sync(), but did not start there"}
            )
