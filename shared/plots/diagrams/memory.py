"""Diagrams of memory: what a rank holds during a step, and how to create a model that never exists in full."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import OWN_RANK, WORLD_SIZE, Clock, Drawing
from shared.plots.memory_plan import COMPONENT_STYLES

_LAYERS, _PARAMETERS_GB, _OPTIMIZER_GB, _ACTIVATIONS_GB = 4, 4, 8, 8
_LASTS_MS = {"forward": 10, "backward": 20, "optimizer": 20, "next step": 20}  # forward and backward: of one layer


@dataclass(frozen=True)
class Moment:
    """What a rank holds during a part of a step. The parts of forward and backward are one layer each."""

    phase: str
    held_gb: dict[str, float]  # by component, from the bottom of the diagram to its top

    @property
    def total_gb(self) -> float:
        return sum(self.held_gb.values())


def moments() -> list[Moment]:
    """Compute what a rank holds during a step in fp32 with Adam. All layers have the same size.

    Forward keeps the activations of each layer. Backward holds the activations and the gradients of a layer together,
    before it frees the activations. All gradients stay until zero_grad().
    """
    forward = [("forward", 0, layer + 1) for layer in range(_LAYERS)]
    backward = [("backward", layer + 1, _LAYERS - layer) for layer in range(_LAYERS)]
    return [
        Moment(
            phase,
            {
                "parameters": _PARAMETERS_GB,
                "optimizer": _OPTIMIZER_GB,
                "gradients": _PARAMETERS_GB * with_gradients / _LAYERS,
                "activations": _ACTIVATIONS_GB * with_activations / _LAYERS,
            },
        )
        for phase, with_gradients, with_activations in (
            *forward,
            *backward,
            ("optimizer", _LAYERS, 0),
            ("next step", 0, 0),
        )
    ]


def training_memory() -> Figure:
    """Draw the parameters, optimizer state, gradients and activations that a rank holds during one step."""
    held = moments()
    drawing = Drawing(8.8, 4.75, "Memory over one step: parameters and optimizer state stay, the rest comes and goes")
    bottom, inch_per_gb, gap = 4.1, 0.15, 0.04
    step_ms = sum(_LASTS_MS[moment.phase] for moment in held)
    clock = Clock(0.95, 6.85, 0, step_ms)
    for gb in range(0, 21, 5):
        y = bottom - inch_per_gb * gb
        drawing.line((clock.left_in - 0.06, y), (clock.left_in, y))
        drawing.text(clock.left_in - 0.12, y, f"{gb}", "note", ha="right")
    drawing.text(0.15, bottom - inch_per_gb * 22.5, "GB (example)", "note", ha="left")
    peak = max(held, key=lambda moment: moment.total_gb)
    began_ms, phase = 0, None
    for moment in held:
        ended_ms = began_ms + _LASTS_MS[moment.phase]
        y = bottom
        for component, component_gb in moment.held_gb.items():
            color, hatch = COMPONENT_STYLES[component]
            y -= inch_per_gb * component_gb
            stays = component in ("parameters", "optimizer")  # one span for the whole step
            if component_gb and not (stays and began_ms):
                style = {"facecolor": color, "hatch": hatch, "height": inch_per_gb * component_gb - gap}
                clock.span(drawing, y, (began_ms, step_ms if stays else ended_ms), "", **style)
        if moment.phase != phase:
            phase, phase_ms = moment.phase, _LASTS_MS[moment.phase] * sum(each.phase == moment.phase for each in held)
            clock.span(drawing, bottom + 0.1, (began_ms, began_ms + phase_ms), phase, height=0.34)
            if phase != "forward":
                words, weight = f"{moment.total_gb:g} GB", "normal"
                if moment is peak:
                    words, weight = f"peak: {words}", "bold"
                drawing.text(clock.x(began_ms + _LASTS_MS[phase] / 2), y - 0.15, words, weight=weight)
        began_ms = ended_ms
    _explain_components(drawing, clock.right_in + 0.2, 1.3)
    return drawing.finish()


def _explain_components(drawing: Drawing, x: float, y: float) -> None:
    explanations = {
        "activations": "kept by forward,\nfreed by backward",
        "gradients": "written by backward,\nfreed by zero_grad()",
        "optimizer": "momentum and variance,\nkept between steps",
        "parameters": "kept between steps",
    }
    for component, explanation in explanations.items():
        color, hatch = COMPONENT_STYLES[component]
        drawing.span(x, y - 0.11, 0.22, 0.22, facecolor=color, hatch=hatch)
        name = "optimizer state" if component == "optimizer" else component
        drawing.text(x + 0.3, y, name, ha="left", weight="bold")
        drawing.text(x, y + 0.18, explanation, "note", ha="left", va="top", linespacing=1.3)
        y += 0.74


_PARAMETERS, _PARAMETER_GB = 4, 12


@dataclass(frozen=True)
class Created:
    """What a rank holds at a stage of creating a model: its shards of parameters, and parameters in full."""

    name: str
    explanation: str
    shards: tuple[int, ...] = ()
    full: tuple[int, ...] = ()

    def gb(self, world_size: int) -> float:
        return _PARAMETER_GB * (len(self.shards) / world_size + len(self.full))


_ALL = tuple(range(_PARAMETERS))
STAGES = (
    Created("1  Build on meta", "Sharded, with shapes,\nbut without memory."),
    Created("2  Allocate the shards", "This rank's rows get\nmemory, but no values.", _ALL),
    Created("3  Draw a parameter", "It gets memory and values,\nbeside the shards.", _ALL, _ALL[:1]),
    Created("4  Keep its rows", "They are copied to the shard,\nand the rest is freed.", _ALL),
    Created("5  Repeat", "The same for each parameter,\nup to the last one.", _ALL, _ALL[-1:]),
    Created("Without meta", "All parameters are there\nbefore they are sharded.", (), _ALL),
)


def deferred_init() -> Figure:
    """Draw how a rank creates a model that never exists in full: build it on meta, then one parameter at a time."""
    drawing = Drawing(8.8, 7.1, "Deferred initialization on one rank: one parameter at a time, never the whole model")
    left, width, height, column = 2.95, 0.72, 0.15, 0.87
    full_x = left + column * _PARAMETERS + 0.3
    drawing.text(left + column * _PARAMETERS / 2 - 0.07, 0.62, "the 4 parameters (example) by rows", "note")
    drawing.text(full_x + width / 2, 0.62, "drawn in full", "note")
    tops = [0.85 + 0.98 * row for row in range(len(STAGES) - 1)] + [6.0]
    drawing.line((0.15, tops[-1] - 0.2), (drawing.width_in - 0.15, tops[-1] - 0.2), color="0.75")
    for top, stage in zip(tops, STAGES, strict=True):
        drawing.name_rows((top, stage.name, stage.explanation))
        for parameter in range(_PARAMETERS):
            for rank in range(WORLD_SIZE):
                place = left + column * parameter, top + height * rank
                held = rank == OWN_RANK if stage.shards else parameter in stage.full
                drawing.cell(*place, "", (rank,), (width, height)) if held else drawing.absent(*place, (width, height))
        for parameter in stage.full if stage.shards else ():
            for rank in range(WORLD_SIZE):
                drawing.cell(full_x, top + height * rank, "", (rank,), (width, height))
            drawing.text(full_x + width / 2, top + height * WORLD_SIZE + 0.13, f"parameter {parameter}", "note")
        words = f"holds {stage.gb(WORLD_SIZE):g} GB"
        drawing.text(drawing.width_in - 0.15, top + 0.3, words, ha="right", weight="bold")
    words = f"Colors are ranks. The rows of rank {OWN_RANK} are its shard; dashed rows have no memory on it."
    drawing.text(0.15, 6.95, words, "note", ha="left")
    return drawing.finish()
