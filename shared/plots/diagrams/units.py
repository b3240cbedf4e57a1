"""Diagrams of ZeRO-3's units: how a unit is sharded, which hooks it has, and when it is unsharded during a step."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots import rank_color
from shared.plots.diagrams.drawing import CELL_IN, COMPUTE, OWN_RANK, STRIPE_IN, WAITS, WORLD_SIZE, Clock, Drawing

SHAPES = {"weight": (2, 3), "bias": (1, 2), "scale": (1, 2)}  # of a unit's parameters


def shards_of(world_size: int) -> list[list[int | None]]:
    """Return the elements in each rank's shard of the unit. Elements of padding are None."""
    numel = sum(rows * columns for rows, columns in SHAPES.values())
    shard_numel = -(-numel // world_size)
    flat = [index if index < numel else None for index in range(world_size * shard_numel)]
    return [flat[rank * shard_numel : (rank + 1) * shard_numel] for rank in range(world_size)]


def unit() -> Figure:
    """Draw how a unit's parameters become a flat parameter and shards, and what its four hooks do."""
    drawing = Drawing(8.8, 6.75, "A unit: one flat parameter, one shard per rank, four hooks")
    drawing.name_rows(
        (0.7, "Parameters", "of the unit (example);\nnumbers are elements"),
        (1.8, "Flat parameter", "side by side, padded to\na multiple of the ranks"),
        (2.8, "Shards", "each rank keeps one"),
    )
    _draw_sharding(drawing, 2.35, shards_of(WORLD_SIZE))
    drawing.line((0.15, 4.0), (drawing.width_in - 0.15, 4.0), color="0.75")
    _draw_hooks(drawing, 4.2)
    return drawing.finish()


def _draw_sharding(drawing: Drawing, left: float, shards: list[list[int | None]]) -> None:
    width, height = CELL_IN[0], 0.3
    x, element = left, 0
    for name, (rows, columns) in SHAPES.items():
        middle, top = x + width * rows * columns / 2, 0.78 + height * (2 - rows)
        shape = f"{name} [{rows}, {columns}]" if rows > 1 else f"{name} [{columns}]"
        drawing.text(middle, top - 0.14, shape, "note")
        for row in range(rows):
            for column in range(columns):
                cell_x = middle + 0.42 * (column - columns / 2)
                drawing.cell(cell_x, top + height * row, f"{element}", (), (0.42, height))
                element += 1
        drawing.arrow((middle, 1.42), (middle, 1.82))
        x += width * rows * columns
    for rank, shard in enumerate(shards):
        shard_x, shard_in = left + width * len(shard) * rank, width * len(shard)
        middle = shard_x + shard_in / 2
        for index, own in enumerate(shard):
            words = "" if own is None else f"{own}"  # padding has no number
            drawing.cell(shard_x + width * index, 1.85, words, (rank,))
            drawing.cell(middle + 0.42 * (index - len(shard) / 2), 3.26, words, (rank,), (0.42, CELL_IN[1]))
        drawing.arrow((middle, 2.27), (middle, 2.76))
        drawing.box(shard_x + 0.05, 2.8, shard_in - 0.1, 0.95)
        drawing.rank_label(shard_x + 0.05, 2.8, rank, shard_in - 0.1)
    padding = sum(element is None for shard in shards for element in shard)
    drawing.text(x + width * padding / 2, 1.7, "padding", "note")


def _draw_hooks(drawing: Drawing, top: float) -> None:
    """Draw the hooks over time, and below them what one rank holds."""
    left, right = 2.35, drawing.width_in - 0.15
    hooks = {
        2.95: ("pre_forward", "unshards:\nan all-gather"),
        4.2: ("post_forward", "reshards:\nfrees memory"),
        5.65: ("pre_backward", "unshards:\nan all-gather"),
        7.55: ("post_backward", "reduce-scatters the\ngradients, reshards"),
    }
    forward_x, forward_end_x, backward_x, backward_end_x = hooks
    for x, (name, effect) in hooks.items():
        drawing.code(x, top + 0.1, name, weight="bold")
        drawing.text(x, top + 0.27, effect, "note", va="top", linespacing=1.3)
        drawing.arrow((x, top + 0.66), (x, top + 0.82))
    compute_y, memory_y = top + 0.85, top + 1.6
    drawing.span(forward_x, compute_y, forward_end_x - forward_x, 0.42, "forward", facecolor=COMPUTE)
    drawing.span(backward_x, compute_y, backward_end_x - backward_x, 0.42, "backward", facecolor=COMPUTE)
    drawing.text((forward_end_x + backward_x) / 2, compute_y + 0.21, "other units", "note")
    drawing.name_rows((top, "Hooks", "around forward\nand backward"))
    flat_in = WORLD_SIZE * STRIPE_IN
    drawing.text(0.15, compute_y + 0.21, "compute", ha="left")
    drawing.text(0.15, memory_y + flat_in / 2, "flat parameter", ha="left")
    drawing.text(0.15, memory_y + 0.68, f"shard of rank {OWN_RANK}", ha="left")
    for began_x, ended_x in ((forward_x, forward_end_x), (backward_x, backward_end_x)):
        drawing.shards(began_x, memory_y, ended_x - began_x, range(WORLD_SIZE))
    for began_x, ended_x in ((left, forward_x), (forward_end_x, backward_x), (backward_end_x, right)):
        drawing.absent(began_x, memory_y, (ended_x - began_x, flat_in))
    drawing.text((forward_end_x + backward_x) / 2, memory_y + flat_in / 2, "no memory", "note")
    drawing.span(left, memory_y + 0.6, right - left, STRIPE_IN, facecolor=rank_color(OWN_RANK))


_UNITS, _WORLD_SIZE = 3, 4
_FORWARD_MS, _BACKWARD_MS, _FLIGHT_MS = 20.0, 30.0, 12.0
_UNSHARDING = {"hatch": "//", "edgecolor": "0.35"}


@dataclass(frozen=True)
class Span:
    """What happens to a unit, and when, in ms since the step began."""

    unit: int
    name: str
    began_ms: float
    ended_ms: float


class UnitsRun:
    """Runs one step of units in order, with the hooks of chapters 09 and 10, and records when each thing happens.

    Every unit prefetches the next one, as it does from the second step on. The collectives are in flight one at a
    time, in the order of their launch. The root is left out: it is unsharded for the whole step.
    """

    def __init__(self, units: int = _UNITS):
        self.now_ms = self.wire_free_ms = 0.0
        self.computed: list[Span] = []  # forward, backward, waits
        self.all_gathers: list[Span] = []
        self.reduce_scatters: list[Span] = []
        self.states: list[Span] = []  # SHARDED, UNSHARDING, or UNSHARDED, also for BACKWARD
        self._state: dict[int, tuple[str, float]] = dict.fromkeys(range(units), ("SHARDED", 0.0))
        for unit in range(units):
            self._unshard(unit)
            self._wait_for_unshard(unit)
            if unit + 1 < units:
                self._unshard(unit + 1)
            self._compute(unit, "forward", _FORWARD_MS)
            self._change(unit, "SHARDED")
        for unit in reversed(range(units)):
            self._unshard(unit)
            self._wait_for_unshard(unit)
            if unit:
                self._unshard(unit - 1)
            self._compute(unit, "backward", _BACKWARD_MS)
            if self.reduce_scatters:
                self._wait_until(unit, self.reduce_scatters[-1].ended_ms)
            self._launch(self.reduce_scatters, unit, "reduce-scatter")
            self._change(unit, "SHARDED")
        self._wait_until(unit, self.wire_free_ms)  # finish_gradient_sync()
        for unit in range(units):
            self._change(unit, "SHARDED")

    def _launch(self, lane: list[Span], unit: int, name: str) -> None:
        began_ms = max(self.now_ms, self.wire_free_ms)
        self.wire_free_ms = began_ms + _FLIGHT_MS
        lane.append(Span(unit, name, began_ms, self.wire_free_ms))

    def _unshard(self, unit: int) -> None:
        if self._state[unit][0] == "SHARDED":
            self._launch(self.all_gathers, unit, "all-gather")
            self._change(unit, "UNSHARDING")

    def _wait_for_unshard(self, unit: int) -> None:
        self._wait_until(unit, next(span.ended_ms for span in reversed(self.all_gathers) if span.unit == unit))
        self._change(unit, "UNSHARDED")

    def _wait_until(self, unit: int, ended_ms: float) -> None:
        if ended_ms > self.now_ms:
            self._compute(unit, "waits", ended_ms - self.now_ms)

    def _compute(self, unit: int, name: str, lasts_ms: float) -> None:
        self.computed.append(Span(unit, name, self.now_ms, self.now_ms + lasts_ms))
        self.now_ms += lasts_ms

    def _change(self, unit: int, state: str) -> None:
        before, began_ms = self._state[unit]
        if self.now_ms > began_ms:
            self.states.append(Span(unit, before, began_ms, self.now_ms))
        self._state[unit] = state, self.now_ms


def unit_states() -> Figure:
    """Draw the states of three units over one step with prefetching: sharded, unsharding, unsharded, sharded."""
    run = UnitsRun()
    drawing = Drawing(8.8, 6.05, "The states of three units: prefetching unshards the next one during compute")
    clock = Clock(1.75, drawing.width_in - 0.3, 0, run.now_ms)
    compute_y, gather_y, reduce_y = 0.6, 1.35, 1.95
    drawing.text(0.15, compute_y + 0.2, "compute", ha="left")
    drawing.text(0.15, gather_y + 0.17, "all-gathers", ha="left")
    drawing.text(0.15, reduce_y + 0.17, "reduce-scatters", ha="left")
    for span in run.computed:
        times_ms = span.began_ms, span.ended_ms
        if span.name == "waits":
            clock.span(drawing, compute_y, times_ms, "waits", 0.4, size=9, **WAITS)
        else:
            clock.span(drawing, compute_y, times_ms, f"{span.name} {span.unit}", 0.4, size=9, facecolor=COMPUTE)
    starts_ms = {(span.name, span.unit): span.began_ms for span in run.computed}
    for index, span in enumerate(run.all_gathers):
        x, width = clock.x(span.began_ms), clock.inch_per_ms * _FLIGHT_MS
        drawing.collective(x + 0.02, gather_y, width - 0.04, f"{span.unit}")
        hook = ("forward", span.unit - 1) if index < _UNITS else ("backward", span.unit + 1)
        if hook in starts_ms:
            drawing.message((clock.x(starts_ms[hook]), compute_y + 0.42), (x + 0.02, gather_y - 0.02))
    drawing.text(clock.x(_FLIGHT_MS) + 0.08, 1.18, "prefetch", "note", ha="left")
    for span in run.reduce_scatters:
        x, width = clock.x(span.began_ms), clock.inch_per_ms * _FLIGHT_MS
        drawing.collective(x + 0.02, reduce_y, width - 0.04, f"{span.unit}")
    for unit_index in range(_UNITS):
        y = 2.6 + 0.75 * unit_index
        drawing.text(0.15, y + 0.22, f"unit {unit_index}", "heading", ha="left", weight="bold")
        drawing.span(clock.left_in, y + 0.5, clock.right_in - clock.left_in, STRIPE_IN, facecolor=rank_color(OWN_RANK))
        for span in run.states:
            if span.unit == unit_index:
                _draw_state(drawing, clock, y, span)
    clock.axis(drawing, 4.95, [0.0, 50.0, 100.0, 150.0])
    _explain_states(drawing, 5.45)
    return drawing.finish()


def _draw_state(drawing: Drawing, clock: Clock, y: float, span: Span) -> None:
    x, width = clock.x(span.began_ms), clock.inch_per_ms * (span.ended_ms - span.began_ms)
    height = _WORLD_SIZE * STRIPE_IN
    if span.name == "UNSHARDED":
        drawing.shards(x, y, width, range(_WORLD_SIZE))
    elif span.name == "UNSHARDING":
        drawing.span(x, y, width, height, **_UNSHARDING)
    elif width > 0.8:
        drawing.text(x + width / 2, y + height / 2, "sharded", "note")


def _explain_states(drawing: Drawing, y: float) -> None:
    drawing.span(0.15, y - 0.06, 0.4, STRIPE_IN, facecolor=rank_color(OWN_RANK))
    drawing.text(0.65, y, f"shard of rank {OWN_RANK}, always held", "note", ha="left")
    drawing.span(3.2, y - 0.17, 0.4, 0.34, **_UNSHARDING)
    drawing.text(3.7, y, "unsharding: all-gather launched", "note", ha="left")
    drawing.shards(6.3, y - 0.22, 0.4, range(_WORLD_SIZE))
    drawing.text(6.8, y, "unsharded: four shards", "note", ha="left")
    words = "Not drawn: gradients, and the root, which stays unsharded for the whole step."
    drawing.text(0.15, y + 0.38, words, "note", ha="left")
