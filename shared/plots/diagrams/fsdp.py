"""Diagrams of FSDP2: how it shards each parameter by rows, when its hooks run, and what runs on which stream."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import COMPUTE, WORLD_SIZE, Clock, Drawing

SHAPES = {"weight": (6, 2), "bias": (6,)}  # of a unit's parameters
_COPIES = {"hatch": "////", "edgecolor": "0.35"}  # the style of a span in which data is copied


def row_counts(rows: int, world_size: int) -> list[int]:
    """Return how many of a parameter's rows each rank gets, as torch.chunk cuts them."""
    most = -(-rows // world_size)
    return [max(0, min(most, rows - most * rank)) for rank in range(world_size)]


def flat_shards(world_size: int) -> list[list[int | None]]:
    """Return the elements in each rank's shard of the flat parameter. Elements of padding are None."""
    numel = sum(shape[0] * _columns(shape) for shape in SHAPES.values())
    shard_numel = -(-numel // world_size)
    flat = [index if index < numel else None for index in range(world_size * shard_numel)]
    return [flat[rank * shard_numel : (rank + 1) * shard_numel] for rank in range(world_size)]


def slots(world_size: int) -> list[list[int | None]]:
    """Return what each rank copies into its slot of the all-gather's buffer: its shards, padded to those of rank 0."""
    filled: list[list[int | None]] = [[] for _ in range(world_size)]
    first = 0
    for shape in SHAPES.values():
        counts, columns = row_counts(shape[0], world_size), _columns(shape)
        for slot, count in zip(filled, counts, strict=True):
            slot += [*range(first, first + count * columns), *[None] * ((counts[0] - count) * columns)]
            first += count * columns
    return filled


def _columns(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 else 1


def per_parameter() -> Figure:
    """Draw a unit as a flat parameter, and with each parameter cut by rows; and FSDP2's copies around all-gathers."""
    drawing = Drawing(8.8, 6.4, "Two ways to shard a unit: through a flat parameter, and parameter by parameter")
    left, cell_in = 2.3, (0.26, 0.3)
    drawing.name_rows(
        (0.72, "Flat parameter", "Chapter 09, FSDP1: cut\nanywhere, even in a row."),
        (1.95, "Per parameter", "FSDP2: each is cut by its\nrows. Local shapes:"),
        (3.95, "Copy-in", "A rank's shards fill its slot\nof one buffer."),
        (5.4, "Copy-out", "Each parameter is copied\nout of the buffer."),
    )
    _draw_flat(drawing, left, cell_in, flat_shards(WORLD_SIZE))
    drawing.line((0.15, 1.68), (drawing.width_in - 0.15, 1.68), color="0.75")
    _draw_rows(drawing, left)
    x, numels = left, [0]
    for rank, slot in enumerate(slots(WORLD_SIZE)):
        for element in slot:
            drawing.cell(x, 3.98, "" if element is None else f"{element}", (rank,), cell_in)
            x += cell_in[0]
        numels.append(numels[-1] + len(slot))
    drawing.collective(left, 4.62, x - left, "all-gather: every rank gets the slots of all ranks")
    owner = {element: rank for rank, slot in enumerate(slots(WORLD_SIZE)) for element in slot if element is not None}
    first, x = 0, left
    for name, shape in SHAPES.items():
        numel = shape[0] * _columns(shape)
        for element in range(first, first + numel):
            drawing.cell(x + cell_in[0] * (element - first), 5.5, f"{element}", (owner[element],), cell_in)
        middle = x + cell_in[0] * numel / 2
        drawing.arrow((middle, 5.0), (middle, 5.26))
        drawing.text(middle, 5.38, f"{name} {list(shape)}", "note")
        first, x = first + numel, x + cell_in[0] * numel + 0.4
    words = "A color is the rank that owns an element. Cells without a number are padding."
    drawing.text(0.15, 6.24, words, "note", ha="left")
    return drawing.finish()


def _draw_flat(drawing: Drawing, left: float, cell_in: tuple[float, float], shards: list[list[int | None]]) -> None:
    x, first = left, 0
    for name, shape in SHAPES.items():
        numel = shape[0] * _columns(shape)
        drawing.text(left + cell_in[0] * (first + numel / 2), 0.66, f"{name} {list(shape)}", "note")
        first += numel
    for rank, shard in enumerate(shards):
        for element in shard:
            drawing.cell(x, 0.8, "" if element is None else f"{element}", (rank,), cell_in)
            x += cell_in[0]
        drawing.rank_label(x - cell_in[0] * len(shard) + 0.03, 1.2, rank, cell_in[0] * len(shard) - 0.06, 0.32)


def _draw_rows(drawing: Drawing, left: float) -> None:
    """Draw the two parameters in the colors of their owners, and a box with the local shapes of each rank."""
    width, height, top = 0.26, 0.22, 2.12
    x, first = left, 0
    for name, shape in SHAPES.items():
        columns = _columns(shape)
        drawing.text(x + width * columns / 2, top - 0.15, name, "note")
        row = 0
        for rank, count in enumerate(row_counts(shape[0], WORLD_SIZE)):
            for _ in range(count * columns):
                at = x + width * ((row % columns) if columns > 1 else 0), top + height * (row // columns)
                drawing.cell(*at, f"{first + row}", (rank,), (width, height))
                row += 1
        first, x = first + row, x + width * columns + 0.35
    boxes_x = left + 1.55
    column = (drawing.width_in - boxes_x - 0.15) / WORLD_SIZE
    slot_in = width * len(slots(WORLD_SIZE)[0])
    for rank in range(WORLD_SIZE):
        box_x = boxes_x + column * rank
        drawing.box(box_x + 0.05, 1.88, column - 0.1, 1.6)
        drawing.rank_label(box_x + 0.05, 1.88, rank, column - 0.1)
        for line, (name, shape) in enumerate(SHAPES.items()):
            local = [row_counts(shape[0], WORLD_SIZE)[rank], *shape[1:]]
            drawing.text(box_x + column / 2, 2.6 + 0.45 * line, f"{name} {local}", "note")
        slot_middle = left + slot_in * (rank + 0.5)
        drawing.arrow((box_x + column / 2, 3.5), (slot_middle, 3.94))


@dataclass(frozen=True)
class HookCall:
    """A call of one of FSDP2's hooks. The root is the unit of the model itself."""

    hook: str  # one of HOOKS
    unit: str  # "root" or "block 0"


HOOKS = {
    "pre_forward": "before a unit's forward: unshard it",
    "post_forward": "after it: reshard the unit, unless it is the root",
    "pre_backward": "the gradient of its output is complete: unshard it again",
    "post_backward": "the gradients of its inputs are complete: reshard it, reduce-scatter its gradients",
    "root's callback": "backward is over: post_backward of the root, wait for the last reduce-scatter",
}


def hook_calls(blocks: int) -> list[HookCall]:
    """List the calls of one step in their order. The root gets tokens, so autograd never calls its post_backward."""
    names = [f"block {number}" for number in range(blocks)]
    forward = [HookCall(hook, name) for name in names for hook in ("pre_forward", "post_forward")]
    backward = [HookCall(hook, name) for name in reversed(names) for hook in ("pre_backward", "post_backward")]
    around = [HookCall(hook, "root") for hook in HOOKS if hook != "post_backward"]
    return [around[0], *forward, *around[1:3], *backward, around[3]]


def fsdp_hooks(blocks: int = 2) -> Figure:
    """Draw the order of FSDP2's hooks in one step, and when each unit is unsharded, without prefetching."""
    calls = hook_calls(blocks)
    units = ["root", *(f"block {number}" for number in range(blocks))]
    tops = {unit: 0.98 + 0.62 * row for row, unit in enumerate(units)}
    drawing = Drawing(8.8, 3.6 + 0.62 * blocks, f"The hooks of one step, in their order: a root with {blocks} blocks")
    clock = Clock(1.35, drawing.width_in - 0.45, 0, len(calls) - 1)
    for unit, top in tops.items():
        drawing.text(0.15, top + 0.17, unit, "heading", ha="left", weight="bold")
        drawing.line((clock.x(0), top + 0.17), (clock.x(len(calls) - 1), top + 0.17), color="0.8", zorder=0)
        moments = [moment for moment, call in enumerate(calls) if call.unit == unit]
        spans = [(moments[0], moments[-1])] if unit == "root" else [(moments[0], moments[1]), (moments[2], moments[3])]
        for span in spans:
            clock.span(drawing, top, span, "", 0.34, facecolor=COMPUTE)
    numbers = {hook: number for number, hook in enumerate(HOOKS, 1)}
    for moment, call in enumerate(calls):
        _number(drawing, clock.x(moment), tops[call.unit] + 0.17, numbers[call.hook])
    half = len(calls) / 2 - 0.5
    for name, middle in (("forward", half / 2), ("backward", 1.5 * half)):
        drawing.text(clock.x(middle), 0.68, name, "note")
    drawing.line((clock.x(half), 0.6), (clock.x(half), tops[units[-1]] + 0.5), color="0.6", linestyle="--")
    y = tops[units[-1]] + 0.78
    for hook, does in HOOKS.items():
        _number(drawing, 0.28, y, numbers[hook])
        drawing.text(0.5, y, hook, ha="left", weight="bold")
        drawing.text(1.95, y, does, "note", ha="left")
        y += 0.28
    drawing.span(0.17, y - 0.06, 0.22, 0.22, facecolor=COMPUTE)
    drawing.text(0.5, y + 0.05, "The unit is unsharded. Not drawn: prefetching.", "note", ha="left")
    return drawing.finish()


def _number(drawing: Drawing, x: float, y: float, number: int) -> None:
    drawing.box(x - 0.11, y - 0.11, 0.22, 0.22, facecolor="white", edgecolor="black", zorder=2)
    drawing.text(x, y, f"{number}", "note", zorder=3)


_UNITS = 3
_FORWARD_MS, _BACKWARD_MS, _COPY_MS, _FLIGHT_MS, _OPTIMIZER_MS = 20.0, 40.0, 8.0, 14.0, 12.0
STREAMS = ("copy-in", "all-gather", "compute", "reduce-scatter")


@dataclass(frozen=True)
class Task:
    """What a stream does, and when, in ms since the step began."""

    stream: str
    name: str
    unit: int
    began_ms: float
    ended_ms: float


class StreamsRun:
    """Runs one step of FSDP2, with one stream for each kind of work, or with a single one that does everything.

    The host queues work in the order of this code, and is always ahead. Work on a stream begins when the stream is
    free, and the events for which it waits have happened. Collectives share a communicator, so they run one at a time,
    in the order in which they were queued. The root is left out.

    Args:
        units: How many units there are besides the root.
        blocking: Whether every call returns only when its work is done, as with gloo on a CPU.
    """

    def __init__(self, units: int = _UNITS, blocking: bool = False):
        self.blocking, self.tasks = blocking, []
        self._free_ms: dict[str, float] = dict.fromkeys((*STREAMS, "wire"), 0.0)
        self._gathered: dict[int, Task] = {}
        copied: dict[int, Task] = {}  # by unit: the copy-out of forward
        for unit in range(units):
            # An all-gather waits until the buffer of the one before the previous one is free.
            self._gather(unit, copied.get(unit - 2))
            copied[unit] = self._copy_out(unit)
            self._add("compute", "forward", unit, _FORWARD_MS)
        self._gather(units - 1, copied[units - 1])
        reduced: Task | None = None
        for unit in reversed(range(units)):
            copied_out = self._copy_out(unit)
            if unit:
                self._gather(unit - 1, copied_out)
            self._add("compute", "backward", unit, _BACKWARD_MS)
            copied_in = self._add("compute", "copy", unit, _COPY_MS, reduced)
            reduced = self._add("reduce-scatter", "reduce-scatter", unit, _FLIGHT_MS, copied_in)
        self._add("compute", "optimizer", 0, _OPTIMIZER_MS, reduced)  # after the callback at the end of backward
        self.ended_ms = self.tasks[-1].ended_ms

    def _gather(self, unit: int, after: Task | None) -> None:
        copied_in = self._add("copy-in", "copy", unit, _COPY_MS, after)
        self._gathered[unit] = self._add("all-gather", "all-gather", unit, _FLIGHT_MS, copied_in)

    def _copy_out(self, unit: int) -> Task:
        return self._add("compute", "copy", unit, _COPY_MS, self._gathered[unit])

    def _add(self, stream: str, name: str, unit: int, lasts_ms: float, after: Task | None = None) -> Task:
        used = [stream, "wire"] if name in ("all-gather", "reduce-scatter") else [stream]
        used = list(self._free_ms) if self.blocking else used
        began_ms = max([self._free_ms[each] for each in used] + ([after.ended_ms] if after else []))
        self._free_ms |= dict.fromkeys(used, began_ms + lasts_ms)
        self.tasks.append(Task(stream, name, unit, began_ms, began_ms + lasts_ms))
        return self.tasks[-1]


def streams() -> Figure:
    """Draw a step of FSDP2 on the streams of a GPU, and below it the same step where every call blocks."""
    on_streams, in_order = StreamsRun(), StreamsRun(blocking=True)
    drawing = Drawing(8.8, 5.65, "A drawing, not a recording: one step of FSDP2 with streams, and without")
    clock = Clock(1.75, drawing.width_in - 0.3, 0, in_order.ended_ms)
    tops: dict[str, float] = dict(zip(STREAMS, (0.95, 1.5, 2.1, 2.75), strict=True))
    for stream, top in tops.items():
        drawing.text(0.15, top + 0.17, f"{stream} stream", ha="left")
    drawing.text(0.15, 0.68, "GPU, 4 streams", "heading", ha="left", weight="bold")
    for task in on_streams.tasks:
        _draw_task(drawing, clock, tops[task.stream], task, numbers_copies=task.stream != "compute")
    _draw_events(drawing, clock, tops, on_streams.tasks)
    _name_phases(drawing, clock, 0.68, on_streams.tasks)
    drawing.line((0.15, 3.3), (drawing.width_in - 0.15, 3.3), color="0.75")
    drawing.text(0.15, 3.55, "CPU and gloo", "heading", ha="left", weight="bold")
    drawing.text(0.15, 4.02, "one thread", ha="left")
    for task in in_order.tasks:
        _draw_task(drawing, clock, 3.85, task)
    _name_phases(drawing, clock, 3.55, in_order.tasks)
    clock.axis(drawing, 4.4, [0.0, on_streams.ended_ms, in_order.ended_ms])
    _explain_streams(drawing, 4.93)
    return drawing.finish()


def _draw_task(drawing: Drawing, clock: Clock, y: float, task: Task, numbers_copies: bool = True) -> None:
    times_ms = task.began_ms, task.ended_ms
    if task.name == "copy":
        clock.span(drawing, y, times_ms, "", 0.34, **_COPIES)
        if numbers_copies:
            drawing.text(clock.x(sum(times_ms) / 2), y - 0.09, f"{task.unit}", "note", size=9)
    elif task.name in ("all-gather", "reduce-scatter"):
        drawing.collective(clock.x(task.began_ms) + 0.015, y, clock.inch_per_ms * _FLIGHT_MS - 0.03, f"{task.unit}")
    else:
        words = "" if task.name == "optimizer" else f"{task.unit}"
        clock.span(drawing, y, times_ms, words, 0.34, facecolor="white" if task.name == "optimizer" else COMPUTE)


def _draw_events(drawing: Drawing, clock: Clock, tops: dict[str, float], tasks: list[Task]) -> None:
    """Draw the events for which compute waits, and those for which reduce-scatters wait."""
    for index, task in enumerate(tasks):
        if task.name == "all-gather":
            copied_out = next(
                each for each in tasks[index + 1 :] if each.stream == "compute" and each.unit == task.unit
            )
            start = clock.x(task.ended_ms) - 0.03, tops["all-gather"] + 0.34
            drawing.arrow(start, (clock.x(copied_out.began_ms) + 0.02, tops["compute"]), linewidth=0.9)
        elif task.name == "reduce-scatter":
            start = clock.x(tasks[index - 1].ended_ms) - 0.02, tops["compute"] + 0.34
            drawing.arrow(start, (clock.x(task.began_ms) + 0.05, tops["reduce-scatter"]), linewidth=0.9)


def _name_phases(drawing: Drawing, clock: Clock, y: float, tasks: list[Task]) -> None:
    for name in ("forward", "backward"):
        spans = [task for task in tasks if task.name == name]
        middle = (clock.x(spans[0].began_ms) + clock.x(spans[-1].ended_ms)) / 2
        drawing.text(middle, y, name, "note")
    last = tasks[-1]
    drawing.text(clock.x(last.ended_ms) + 0.05, y, "optimizer", "note", ha="right")


def _explain_streams(drawing: Drawing, y: float) -> None:
    drawing.span(0.15, y - 0.13, 0.3, 0.26, facecolor=COMPUTE)
    drawing.text(0.55, y, "computes", "note", ha="left")
    drawing.span(1.55, y - 0.13, 0.12, 0.26, **_COPIES)
    drawing.text(1.77, y, "copies", "note", ha="left")
    drawing.collective(2.6, y - 0.15, 0.3, "0", 0.3)
    drawing.text(3.0, y, "collective", "note", ha="left")
    drawing.arrow((4.1, y - 0.12), (4.1, y + 0.14), linewidth=0.9)
    drawing.text(4.25, y, "event: the lower stream waits for it, the host does not", "note", ha="left")
    words = "Numbers are units. In the compute stream, the copy before a unit is its copy-out. The copy after its\n"
    words += "backward is the copy-in of its gradients. Not drawn: the root, and the host, which has queued everything."
    drawing.text(0.15, y + 0.45, words, "note", ha="left")
