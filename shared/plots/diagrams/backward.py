"""Diagrams of gradients in backward: which are reduced together, when a bucket is launched, and what stays exposed."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots import LANE_STYLES
from shared.plots.buckets import bucket_style
from shared.plots.diagrams.drawing import MESSAGE, PAPER, WAITS, WORLD_SIZE, Clock, Drawing

_CAP_MB = 20
_GRADIENTS_MB: dict[str, float] = {"embedding": 10, "block 0": 8, "block 1": 8, "block 2": 8, "norm": 4, "output": 8}


def in_buckets(sizes_mb: dict[str, float], cap_mb: float) -> list[list[str]]:
    """Group gradients, starting with the last one, into buckets of at most cap_mb. A larger gradient gets its own."""
    buckets: list[list[str]] = []
    for name, size_mb in reversed(sizes_mb.items()):
        if not buckets or sum(sizes_mb[other] for other in buckets[-1]) + size_mb > cap_mb:
            buckets.append([])
        buckets[-1].append(name)
    return buckets


def buckets() -> Figure:
    """Draw how gradients are copied into buckets, and how each bucket becomes one all-reduce."""
    groups = in_buckets(_GRADIENTS_MB, _CAP_MB)
    title = f"Gradients, buckets, collectives: {len(_GRADIENTS_MB)} gradients become {len(groups)} all-reduces"
    drawing = Drawing(8.8, 4.75, title)
    left, gap = 1.55, 0.3
    inch_per_mb = (drawing.width_in - left - 0.2 - gap * (len(groups) - 1)) / sum(_GRADIENTS_MB.values())
    drawing.name_rows(
        (0.75, "Gradients", "in the order of\nthe parameters"),
        (1.95, "Buckets", f"flat tensors of\nat most {_CAP_MB} MB"),
        (3.15, "Collectives", "one all-reduce\nfor each bucket"),
    )
    x = drawing.width_in - 0.2
    for number, group in enumerate(groups, 1):
        style = bucket_style(number)
        right = x
        for name in group:
            width = inch_per_mb * _GRADIENTS_MB[name]
            x -= width
            drawing.span(x, 0.72, width, 0.5, name, **style)
            drawing.text(x + width / 2, 1.36, f"{_GRADIENTS_MB[name]} MB", "note")
            drawing.arrow((x + width / 2, 1.5), (x + width / 2, 1.91))
        total_mb = sum(_GRADIENTS_MB[name] for name in group)
        drawing.span(x, 1.95, right - x, 0.5, f"bucket {number}: {total_mb} MB", **style)
        middle = (x + right) / 2
        drawing.arrow((middle, 2.5), (middle, 3.06), color=MESSAGE, linewidth=1.5)
        drawing.collective(x, 3.1, right - x, f"all-reduce {number}")
        _draw_ranks(drawing, middle, 3.6)
        x -= gap
    drawing.arrow((drawing.width_in - 0.2, 4.3), (left, 4.3))
    middle = (left + drawing.width_in - 0.2) / 2
    drawing.text(middle, 4.5, "backward computes the last gradient first, so bucket 1 is full first", "note")
    return drawing.finish()


def _draw_ranks(drawing: Drawing, middle: float, y: float) -> None:
    """Draw the ranks that take part in a collective above (middle, y)."""
    width = 0.3
    drawing.text(middle, y + 0.4, "on ranks", "note")
    for rank in range(WORLD_SIZE):
        x = middle + (rank - WORLD_SIZE / 2) * width
        drawing.cell(x, y, f"{rank}", (rank,), (width, 0.26))


@dataclass(frozen=True)
class Step:
    """When the parts of a step begin and end, in ms since backward began. The buckets are in launch order."""

    backward_ms: float
    ready_ms: list[float]
    flights_ms: list[tuple[float, float]]  # (launched, completed) of each bucket's all-reduce

    @property
    def completed_ms(self) -> float:
        return max(self.backward_ms, self.flights_ms[-1][1])

    @property
    def exposed_ms(self) -> float:
        return self.completed_ms - max(self.backward_ms, self.flights_ms[0][0])

    @property
    def hidden_ms(self) -> float:
        return sum(completed - launched for launched, completed in self.flights_ms) - self.exposed_ms

    @property
    def last_hidden_ms(self) -> float:
        """When a rank last computed while an all-reduce was in flight."""
        return max(
            min(completed, self.backward_ms) for launched, completed in self.flights_ms if launched < self.backward_ms
        )


_LAYER_MS, _LAYERS, _BUCKETS, _BUCKET_MS, _FORWARD_MS, _OPTIMIZER_MS = 10, 6, 3, 16, 20, 20


def step_of(world_size: int, overlap: bool) -> Step:
    """Compute the times of a step: a bucket is launched when it is full and the bucket before it is complete.

    Each rank of a ring all-reduce sends 2(N−1)/N times the bytes of the bucket.

    Args:
        overlap: Whether buckets are launched during backward, or all of them after it.
    """
    layers = _LAYERS // _BUCKETS
    ready_ms = [float(_LAYER_MS * layers * (index + 1)) for index in range(_BUCKETS)]
    lasts_ms = _BUCKET_MS * 2 * (world_size - 1) / world_size
    flights_ms, free_ms = [], 0.0
    for ready in ready_ms:
        launched = max(free_ms, ready if overlap else ready_ms[-1])
        free_ms = launched + lasts_ms
        flights_ms.append((launched, free_ms))
    return Step(ready_ms[-1], ready_ms, flights_ms)


def hooks() -> Figure:
    """Draw hooks that fire during backward, the buckets they fill, and the all-reduces that full buckets launch."""
    step = step_of(WORLD_SIZE, overlap=True)
    drawing = Drawing(8.8, 4.75, "Hooks: a bucket is launched as soon as its last gradient is complete")
    clock = Clock(1.75, drawing.width_in - 0.35, 0, step.completed_ms)
    drawing.name_rows(
        (0.8, "Compute", "backward, from the\nlast layer to the first"),
        (1.95, "Buckets", "a hook copies each\ngradient when it fires"),
        (3.2, "Communication", f"all-reduces on {WORLD_SIZE} ranks,\none at a time"),
    )
    layers = _LAYERS // _BUCKETS
    for bucket, (ready_ms, flight_ms) in enumerate(zip(step.ready_ms, step.flights_ms, strict=True), 1):
        style = bucket_style(bucket)
        half = 0.4 * clock.inch_per_ms * _LAYER_MS
        first_x, last_x = clock.x(ready_ms - (layers - 1) * _LAYER_MS), clock.x(ready_ms)
        drawing.box(first_x - half - 0.04, 1.88, last_x - first_x + 2 * half + 0.08, 0.86, facecolor=PAPER)
        drawing.text((first_x + last_x) / 2, 2.58, f"bucket {bucket} is full", "note")
        for index in range(layers):
            ended_ms = ready_ms - (layers - 1 - index) * _LAYER_MS
            layer = _LAYERS - 1 - layers * (bucket - 1) - index
            clock.span(drawing, 0.8, (ended_ms - _LAYER_MS, ended_ms), f"layer {layer}", **style)
            drawing.arrow((clock.x(ended_ms), 1.34), (clock.x(ended_ms), 1.88))
            drawing.span(clock.x(ended_ms) - half, 1.92, 2 * half, 0.5, f"{layer}", **style)
        drawing.message((last_x, 2.76), (clock.x(flight_ms[0]), 3.16))
        clock.span(drawing, 3.2, flight_ms, f"all-reduce {bucket}", **style)
    clock.span(drawing, 0.8, (step.backward_ms, step.completed_ms), "waits", **WAITS)
    drawing.text(clock.x(_LAYER_MS) + 0.06, 1.5, "hook", "note", ha="left")
    drawing.text(clock.x(step.ready_ms[0]) - 0.08, 2.95, "launch", "note", ha="right")
    clock.axis(drawing, 4.2, [0, *step.ready_ms, step.completed_ms])
    return drawing.finish()


def exposed_communication() -> Figure:
    """Draw the same step without and with overlap, and mark which part of its communication is hidden or exposed."""
    drawing = Drawing(8.8, 5.6, "Exposed communication: all-reduces during which a rank has nothing to compute")
    steps = [step_of(WORLD_SIZE, overlap) for overlap in (False, True)]
    end_ms = max(step.completed_ms for step in steps) + _OPTIMIZER_MS
    clock = Clock(1.75, drawing.width_in - 0.35, -_FORWARD_MS, end_ms)
    names = ("Launched after backward", "Launched during backward")
    for top, name, step in zip((0.65, 2.95), names, steps, strict=True):
        _draw_lanes(drawing, clock, top, name, step)
    clock.axis(drawing, 5.1, [0, 20, 40, 60, *(step.completed_ms for step in steps)])
    return drawing.finish()


def _draw_lanes(drawing: Drawing, clock: Clock, top: float, name: str, step: Step) -> None:
    drawing.text(0.15, top + 0.05, name, "heading", ha="left", weight="bold")
    compute_y, communication_y = top + 0.35, top + 0.95
    drawing.text(0.15, compute_y + 0.25, "compute", ha="left")
    drawing.text(0.15, communication_y + 0.25, "communication", ha="left")
    color, _ = LANE_STYLES["forward"]
    clock.span(drawing, compute_y, (-_FORWARD_MS, 0), "forward", facecolor=color)
    color, _ = LANE_STYLES["backward"]
    clock.span(drawing, compute_y, (0, step.backward_ms), "backward", facecolor=color, ink="white")
    clock.span(drawing, compute_y, (step.backward_ms, step.completed_ms), "waits", **WAITS)
    color, _ = LANE_STYLES["optimizer"]
    clock.span(drawing, compute_y, (step.completed_ms, step.completed_ms + _OPTIMIZER_MS), "optimizer", facecolor=color)
    color, hatch = LANE_STYLES["communication"]
    for bucket, flight_ms in enumerate(step.flights_ms, 1):
        clock.span(drawing, communication_y, flight_ms, f"{bucket}", facecolor=color, hatch=hatch)
    x, below = clock.x(step.backward_ms), communication_y + 0.6
    drawing.line((x, compute_y - 0.08), (x, below), linestyle="--", linewidth=1.4, color="black")
    if step.hidden_ms:
        hidden = (clock.x(step.flights_ms[0][0]), clock.x(step.last_hidden_ms))
        _mark(drawing, *hidden, below, f"hidden: {step.hidden_ms:.0f} ms")
    _mark(drawing, x, clock.x(step.completed_ms), below, f"exposed: {step.exposed_ms:.0f} ms", weight="bold")


def _mark(drawing: Drawing, left: float, right: float, y: float, words: str, **style) -> None:
    """Draw a bracket below something, with words below it."""
    drawing.line((left + 0.03, y), (right - 0.03, y), linewidth=1.6)
    for x in (left + 0.03, right - 0.03):
        drawing.line((x, y - 0.06), (x, y), linewidth=1.6)
    drawing.text(left + 0.03, y + 0.2, words, ha="left", **style)
