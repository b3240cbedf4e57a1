"""The timeline of one rank: when it computed, when it communicated, and how much of the communication was hidden.

    with timeline.record(model, optimizer) as line:
        model(inputs).backward()
        optimizer.step()
    line.exposed_ms

Hooks on the model's units record computation, and the wire ledger records communication. `plots.timeline` draws
timelines.

On a GPU, all times are those of events on its streams: a unit starts to compute when the GPU reaches it, and a wait is
the time during which the GPU's stream waits for a collective (see `shared/wire/completion.py`).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shared import wire
from shared.wire import intervals
from shared.wire.clock import Clock

COMPUTE_LANES = ("forward", "backward", "optimizer")
COMMUNICATION = "communication"
ALL_GATHER, REDUCE_SCATTER = "all-gather", "reduce-scatter"  # instead of it, in a timeline that tells them apart
COMMUNICATION_LANES = (COMMUNICATION, ALL_GATHER, REDUCE_SCATTER)
_recorders: dict[int, "_Recorder"] = {}  # by the id of the timeline that is being recorded


@dataclass(frozen=True)
class Span:
    """An interval on one rank, from began_s to ended_s on the machine's monotonic clock."""

    lane: str
    name: str
    began_s: float
    ended_s: float
    payload_bytes: int = 0


@dataclass
class Timeline:
    """What one rank did while it was recorded."""

    rank: int | None = None
    spans: list[Span] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # blocked in waits for communication
    began_s: float = 0.0
    ended_s: float = 0.0
    in_flight: list[str] = field(default_factory=list)  # operations that had not finished at the end; they have no span
    is_simulated: bool = False  # over simulated NCCL, whose times mean nothing

    def lane(self, *names: str) -> list[tuple[float, float]]:
        """Return the intervals of one or more lanes."""
        return [(span.began_s, span.ended_s) for span in self.spans if span.lane in names]

    @property
    def communication_ms(self) -> float:
        """Time during which communication was in flight."""
        return 1e3 * intervals.length_s(self.lane(*COMMUNICATION_LANES))

    @property
    def compute_ms(self) -> float:
        """Time during which this rank computed. Waits inside forward, backward and step do not count."""
        return 1e3 * intervals.length_s(self._computing())

    @property
    def exposed_ms(self) -> float:
        """Time during which communication was in flight and this rank did not compute."""
        return 1e3 * intervals.length_s(intervals.subtract(self.lane(*COMMUNICATION_LANES), self._computing()))

    @property
    def overlap(self) -> float:
        """The fraction of the communication that was hidden behind computation; 0 if there was no communication."""
        return 1 - self.exposed_ms / self.communication_ms if self.communication_ms else 0.0

    def first(self, ms: float) -> "Timeline":
        """Return the beginning of this timeline, for a closer look."""
        end_s = self.began_s + ms / 1e3
        spans = [replace(span, ended_s=min(span.ended_s, end_s)) for span in self.spans if span.began_s < end_s]
        waits = [(began_s, min(ended_s, end_s)) for began_s, ended_s in self.waits if began_s < end_s]
        return replace(self, spans=spans, waits=waits, ended_s=end_s)

    def _computing(self) -> intervals.Intervals:
        return intervals.subtract(self.lane(*COMPUTE_LANES), self.waits)


@contextlib.contextmanager
def record(module: nn.Module | None = None, optimizer=None):
    """Record the block on this rank. Yields a Timeline, which is complete when the block ends.

    A recorded backward ends when the gradients are computed. If a wrapper such as DDP then waits for communication,
    that wait is not part of it.

    Args:
        module: Recorded unit by unit. Units are the children that have parameters; lists and wrappers are expanded.
        optimizer: Its step() is recorded if it is a torch.optim.Optimizer. Otherwise, put the step in a `span`.
    """
    if not isinstance(module, nn.Module | None):
        raise TypeError(f"timeline.record expects a torch.nn.Module as its first argument, got {type(module).__name__}")
    recorder = _Recorder(Timeline())
    with contextlib.ExitStack() as hooks:
        if module is not None:
            recorder.hook_module(module, hooks)
        if isinstance(optimizer, torch.optim.Optimizer):
            recorder.hook_optimizer(optimizer, hooks)
        _recorders[id(recorder.line)] = recorder
        hooks.callback(_recorders.pop, id(recorder.line))
        with wire.ledger() as log:
            recorder.line.began_s = recorder.clock.began_s
            try:
                yield recorder.line
            finally:
                recorder.line.ended_s = recorder.clock.seconds(recorder.clock.mark())
    recorder.finish(log)


@contextlib.contextmanager
def span(line: Timeline, lane: str, name: str):
    """Add the block to a timeline that is being recorded, for code that no hook sees.

    Args:
        lane: "forward", "backward" and "optimizer" count as computation. Any other name gets a row of its own.
    """
    if id(line) not in _recorders:
        raise ValueError("This timeline is not being recorded. Use span inside `with timeline.record(...) as line:`.")
    recorder = _recorders[id(line)]
    began = recorder.clock.mark()
    yield
    recorder.marked.append((lane, name, began, recorder.clock.mark()))


def units_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the units of a model: children that have parameters, with lists and wrappers expanded."""
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(child, (nn.ModuleList, nn.Sequential)) or name == "module":
            yield from units_of(child, f"{prefix}{name}." if name != "module" else prefix)
        else:
            yield f"{prefix}{name}", child


class _Recorder:
    """Turns hook calls into the spans of one timeline."""

    def __init__(self, line: Timeline):
        self.line = line
        self.clock = Clock()
        self.marked: list[tuple] = []  # (lane, name, began, ended), where began and ended are clock marks
        self._backward: list[tuple] = []  # (unit whose backward begins, mark); (None, mark) where backward ends
        self._last_output = None
        self._seen_backward = -1

    def hook_module(self, module: nn.Module, hooks: contextlib.ExitStack) -> None:
        units = list(units_of(module)) or [("model", module)]
        for name, unit in units:
            self._hook_unit(name, unit, hooks)
        hooks.callback(module.register_forward_hook(self._after_forward).remove)

    def _hook_unit(self, name: str, unit: nn.Module, hooks: contextlib.ExitStack) -> None:
        began: list = []
        before = unit.register_forward_pre_hook(lambda _unit, _inputs: began.append(self.clock.mark()))

        def after(_unit, _inputs, output) -> None:
            self.marked.append(("forward", name, began.pop(), self.clock.mark()))
            self._hook_backward(name, output)

        hooks.callback(before.remove)
        hooks.callback(unit.register_forward_hook(after).remove)

    def _after_forward(self, _module, _inputs, output) -> None:
        if _with_gradient(output) is not self._last_output:  # a model may return the output of its last unit
            self._hook_backward("loss", output)
        self._last_output = None

    def _hook_backward(self, name: str, output) -> None:
        """Record when a unit's backward begins: when its output's gradient is ready. It ends when the next begins."""
        self._last_output = _with_gradient(output)
        if self._last_output is not None:
            self._last_output.register_hook(lambda _gradient: self._begin_backward(name))

    def _begin_backward(self, name: str) -> None:
        this_backward = torch._C._current_graph_task_id()
        if this_backward != self._seen_backward:
            self._seen_backward = this_backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._backward.append((name, self.clock.mark()))

    def _end_backward(self) -> None:
        self._backward.append((None, self.clock.mark()))

    def hook_optimizer(self, optimizer: torch.optim.Optimizer, hooks: contextlib.ExitStack) -> None:
        began: list = []
        before = optimizer.register_step_pre_hook(lambda *_: began.append(self.clock.mark()))
        after = optimizer.register_step_post_hook(
            lambda *_: self.marked.append(("optimizer", "step", began.pop(), self.clock.mark()))
        )
        hooks.callback(before.remove)
        hooks.callback(after.remove)

    def finish(self, log: wire.Ledger) -> None:
        """Turn marks into spans, sort them by time, and add the entries of the ledger."""
        for (name, began), (_, ended) in zip(self._backward, self._backward[1:], strict=False):
            if name is not None:
                self.marked.append(("backward", name, began, ended))
        line, seconds = self.line, self.clock.seconds
        line.spans += [Span(lane, name, seconds(began), seconds(ended)) for lane, name, began, ended in self.marked]
        numbered = list(enumerate(log.entries, 1))
        for number, entry in numbered:
            if entry.completed_s is not None:
                line.spans.append(_span_of(number, entry, entry.completed_s))
        line.in_flight = [f"{entry.op} {number}" for number, entry in numbered if entry.in_flight]
        line.spans.sort(key=lambda span: span.began_s)
        line.rank, line.waits, line.is_simulated = log.rank, log.waits, log.is_simulated
        # A completion may be recorded late; see shared/wire/completion.py.
        line.ended_s = max([line.ended_s, *(span.ended_s for span in line.spans)])


def _with_gradient(output) -> torch.Tensor | None:
    """Return the first tensor in a module's output that requires a gradient, or None."""
    leaves = tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)


def _span_of(number: int, entry: wire.Entry, ended_s: float) -> Span:
    direction = {"send": "to", "recv": "from"}.get(entry.op)
    name = f"{entry.op} {direction} {entry.partner}" if direction else f"{entry.op} {number}"
    return Span(COMMUNICATION, name, entry.launched_s, ended_s, entry.payload_bytes)


def rows_of(line: Timeline) -> list[tuple[str, list[Span]]]:
    """Arrange a timeline in rows without overlaps: computation first, then as many rows per lane as needed."""
    lanes: dict[str, list[Span]] = {"compute": [span for span in line.spans if span.lane in COMPUTE_LANES]}
    for lane in sorted({span.lane for span in line.spans} - set(COMPUTE_LANES)):
        lanes[lane] = [span for span in line.spans if span.lane == lane]
    named = []
    for lane, spans in lanes.items():
        rows = intervals.rows([(span.began_s, span.ended_s) for span in spans])
        for row in range(max(rows, default=-1) + 1):
            row_spans = [span for span, its_row in zip(spans, rows, strict=True) if its_row == row]
            named.append((lane if row == 0 else f"{lane} {row + 1}", row_spans))
    return named
