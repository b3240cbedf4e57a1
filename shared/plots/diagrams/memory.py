"""Diagrams of memory: what a rank holds during a step, and how to create a model that never exists in full."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots.diagrams.drawing import Clock, Drawing, check_world_size
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


def stages(world_size: int, rank: int) -> list[set[tuple[int, int]]]:
    """Return the (parameter, shard) pairs for which a rank has memory, at each stage of creating a model.

    The stages: the model is on meta, parameter 0 is drawn, its shards are kept, the last parameter is drawn, all
    are sharded. The last stage, for comparison, is a model that was not built on meta, before it is sharded.
    """
    on_meta: set[tuple[int, int]] = set()
    materialized = {(0, shard) for shard in range(world_size)}
    sharded = {(parameter, rank) for parameter in range(_PARAMETERS)}
    peak = sharded | {(_PARAMETERS - 1, shard) for shard in range(world_size)}
    whole = {(parameter, shard) for parameter in range(_PARAMETERS) for shard in range(world_size)}
    return [on_meta, materialized, {(0, rank)}, peak, sharded, whole]


def deferred_init(world_size: int = 4) -> Figure:
    """Draw how to create a model that never exists in full: build it on meta, then draw one parameter at a time.

    Args:
        world_size: From 2 to 4.
    """
    check_world_size(world_size)
    drawing = Drawing(8.8, 7.7, "Deferred initialization: one parameter at a time, never the whole model")
    left, tops = 2.75, (1.05, 2.15, 3.25, 4.35, 5.45, 6.7)
    column = (drawing.width_in - left - 0.15) / world_size
    parameters = f"The {_PARAMETERS} parameters (rows, example)\nhave shapes, but no memory.\nThe columns are shards."
    explanations = (
        ("1  Build on meta", parameters),
        ("2  Draw a parameter", "It gets memory and values\non every rank."),
        ("3  Keep a shard", "Each rank keeps its own,\nand frees the others."),
        ("4  Repeat", "The peak: the last one in\nfull, and the other shards."),
        ("5  Keep its shard", "Each rank has its shard\nof every parameter."),
        ("Without meta", "Each rank has all parameters\nbefore it can shard them."),
    )
    drawing.name_rows(*((top, *explanation) for top, explanation in zip(tops, explanations, strict=True)))
    size_in = (min(0.36, (column - 0.3) / world_size), 0.14)
    for rank in range(world_size):
        middle = left + column * (rank + 0.5)
        drawing.box(middle - column / 2 + 0.07, 0.5, column - 0.14, 5.95)
        drawing.rank_label(middle - column / 2 + 0.07, 0.5, rank, column - 0.14)
        drawing.box(middle - column / 2 + 0.07, 6.57, column - 0.14, 1.0)
        for top, held in zip(tops, stages(world_size, rank), strict=True):
            for parameter in range(_PARAMETERS):
                for shard in range(world_size):
                    x, y = middle + size_in[0] * (shard - world_size / 2), top + size_in[1] * parameter
                    if (parameter, shard) in held:
                        drawing.cell(x, y, "", (shard,), size_in)
                    else:
                        drawing.absent(x, y, size_in)
            held_gb = len(held) * _PARAMETER_GB / world_size
            drawing.text(middle, top + 0.71, f"holds {held_gb:g} GB", weight="bold" if held else "normal")
        for top in tops[1:5]:
            drawing.arrow((middle, top - 0.25), (middle, top - 0.04))
    return drawing.finish()
