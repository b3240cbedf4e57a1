"""Interactive figures: each one is a thin layer of ipywidgets over a pure figure function in `plots/`.

    widgets.ring_stepper(ranks.pull("log"))    # as the last line of a cell

Each function returns a static figure that shows the same as its widget. This figure is the cell's value, so it is what
a notebook file keeps and what a reader without a kernel sees. The widget itself is displayed above it, and only if
somebody reads the notebook; JupyterLab then hides the figure (custom.css). The reason is that a saved widget shows
"Error displaying widget" when its kernel is gone, which must not happen in the notebooks that we build. (In a student's
own copy, running the cell again fixes it.)
"""

import io
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure

from shared import planner
from shared.memory.lifetimes import Lifetimes
from shared.planner.layouts import Job, TrainingLayout, a100_hosts
from shared.planner.search import Found, search
from shared.planner.shapes import SHAPES
from shared.plots import buckets as bucket_plots
from shared.plots import layouts as layout_plots
from shared.plots import lifetimes as lifetime_plots
from shared.plots import memory_plan as planner_plots
from shared.plots import pipeline as pipeline_plots
from shared.plots import ring as ring_plots
from shared.ranks import reader
from shared.schedules import Schedule

_LABEL = {"description_width": "initial"}


def ring_stepper(logs: list) -> Figure:
    """Step through a ring, drawn by `plots.ring.ring_step`. Returns a figure of all steps side by side.

    Shape: logs [ranks][1 + steps]; see `plots.ring.ring_step`.
    """
    if reader.present():
        display(stepper(lambda step: ring_plots.ring_step(logs, step), last=len(logs[0]) - 1))
    return ring_plots.ring_steps(logs)


def cap_chooser(sizes_bytes: dict[str, int], runs: list[bucket_plots.CapRun]) -> Figure:
    """Choose a cap, and see its buckets and all-reduces (`plots.buckets.cap_run`). Returns a figure of all caps."""
    if reader.present():
        draw = partial(bucket_plots.cap_run, sizes_bytes, runs)
        display(stepper(draw, last=len(runs) - 1, description="cap"))
    return bucket_plots.cap_runs(sizes_bytes, runs)


def lifetime_stepper(lives: dict[str, Lifetimes], own_bytes: int, expected_bytes: dict[str, float], of: str) -> Figure:
    """Step through one step of ZeRO-3, from one change of a unit's state to the next. Returns a figure of all steps.

    The other arguments are those of `plots.lifetimes.lifetimes`.

    Args:
        of: The name of the step to go through.
    """
    if reader.present():
        changes = lifetime_plots.moments(lives[of])

        def draw(index: int) -> Figure:
            return lifetime_plots.moment(lives[of], own_bytes, expected_bytes[of], changes[index])

        display(stepper(draw, last=len(changes) - 1, description="change"))
    return lifetime_plots.lifetimes(lives, own_bytes, expected_bytes)


def memory_planner(
    model: str = "Llama-2 7B",
    ranks: int = 8,
    precision: str = "mixed, 16 bytes per parameter",
    micro_batch: int = 1,
    checkpointing: str = "full",
    attention: str = "fused",
) -> Figure:
    """Choose a model and how to train it, and see how much memory a rank needs. Returns a figure of the given choice.

    The docstring of `planner` says what is counted.

    Raises:
        ValueError: If the planner does not offer a choice.
    """
    offered = {
        "model": list(SHAPES),
        "ranks": [2**power for power in range(11)],
        "precision": list(planner.PRECISIONS),
        "micro_batch": [1, 2, 4, 8, 16],
        "checkpointing": list(planner.CHECKPOINTING),
        "attention": list(planner.ATTENTION),
    }
    values = (model, ranks, precision, micro_batch, checkpointing, attention)
    given: dict[str, Any] = dict(zip(offered, values, strict=True))
    _check_offered(offered, given)
    if reader.present():
        display(chooser(planned, offered, given))
    return planned(**given)


def planned(*, model: str, **choice) -> Figure:
    """Draw the memory that a rank needs for a choice, one bar per strategy."""
    bars = {
        name: planner.plan(SHAPES[model], stage=stage, **choice).by_component()
        for stage, name in planner.STAGES.items()
    }
    kept = "checkpointing: {checkpointing}, attention: {attention}"
    setting = f"{{ranks}} ranks, {{precision}}\nmicro-batch {{micro_batch}}, {kept}".format(**choice)
    return planner_plots.stages(bars, title=f"{model}, {setting}")


def schedule_chooser(
    builders: dict[str, Callable[[int, int, int], Schedule]],
    schedule: str,
    stages: int = 4,
    micro_batches: int = 8,
    chunks: int = 2,
) -> Figure:
    """Choose a pipeline schedule and its size, and see its bubble. Returns a figure of the given choice.

    Args:
        builders: By name, a function of stages, micro-batches and chunks that returns the actions of each stage.

    Raises:
        ValueError: If a choice is not offered.
    """
    offered = {
        "schedule": list(builders),
        "stages": [1, 2, 3, 4, 6, 8],
        "micro_batches": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64],
        "chunks": [1, 2, 3, 4],
    }
    given = {"schedule": schedule, "stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    _check_offered(offered, given)

    def draw(*, schedule: str, stages: int, micro_batches: int, chunks: int) -> Figure:
        try:
            built = builders[schedule](stages, micro_batches, chunks)
        except ValueError as error:
            return pipeline_plots.impossible(schedule, str(error))
        return pipeline_plots.choice(schedule, built)

    if reader.present():
        display(chooser(draw, offered, given))
    return draw(**given)


def layout_chooser(
    model: str = "Llama-2 70B",
    gpus: int = 32,
    tp: int = 8,
    pp: int = 1,
    zero_stage: int = 1,
    micro_batch: int = 1,
    checkpointing: str = "full",
    schedule: str = "1f1b",
    sequences: int = 256,
) -> Figure:
    """Choose how to share a model among A100s, and see memory and time. Returns a figure of the given choice.

    Below the choice, the figure shows the fastest layout that fits. An interleaved schedule has two chunks per stage.

    Args:
        gpus: The number of GPUs, in hosts of 8. The ranks that tp and pp leave over are replicas.
        sequences: Per step, on all GPUs together.

    Raises:
        ValueError: If a choice is not offered.
    """
    offered = {
        "model": [name for name, shape in SHAPES.items() if shape.parameters > 5e9],
        "gpus": [8, 16, 32, 64, 128, 256, 512, 1024],
        "tp": [1, 2, 4, 8, 16],
        "pp": [1, 2, 4, 8, 16, 32],
        "zero_stage": list(planner.STAGES),
        "micro_batch": [1, 2, 4, 8],
        "checkpointing": ["none", "full"],
        "schedule": ["1f1b", "interleaved"],
    }
    values = (model, gpus, tp, pp, zero_stage, micro_batch, checkpointing, schedule)
    given: dict[str, Any] = dict(zip(offered, values, strict=True))
    _check_offered(offered, given)
    found = cache(lambda model, gpus: search(Job(SHAPES[model], sequences), a100_hosts(gpus // 8)))

    def draw(*, model: str, gpus: int, tp: int, pp: int, schedule: str, **how) -> Figure:
        layout = TrainingLayout(
            max(1, gpus // (tp * pp)), pp, tp, schedule=schedule, chunks=1 + (schedule != "1f1b"), **how
        )
        try:
            return compared(found(model, gpus), {"your choice": layout})
        except ValueError as error:
            return layout_plots.impossible(str(layout), str(error))

    if reader.present():
        display(chooser(draw, offered, given))
    return draw(**given)


def compared(found: Found, named: dict[str, TrainingLayout]) -> Figure:
    """Draw what some layouts need, and below them the fastest one that fits.

    Raises:
        ValueError: If a layout does not divide the model, the batch or the cluster.
    """
    candidates = {name: found.candidate(layout) for name, layout in named.items()}
    title = f"{found.job.shape.name} on {found.cluster.gpus:,} {found.cluster.gpu.name}"
    if found.best:
        candidates["fastest that fits"] = found.best
    rows = {
        f"{name}:\n{each.layout.in_lines()}": (each.plan.by_component(), each.time.by_part(), found.verdict(each))
        for name, each in candidates.items()
    }
    return layout_plots.needs(rows, found.cluster.gpu.memory_bytes / 1e9, found.usable_bytes / 1e9, title)


def _check_offered(offered: dict[str, list], given: dict) -> None:
    for name, value in given.items():
        if value not in offered[name]:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, offered[name]))}, got {value!r}")


def chooser(draw: Callable[..., Figure], offered: dict[str, list], given: dict) -> ipywidgets.VBox:
    """Return one dropdown per option over the figure draw(option=value, …)."""
    picture = _picture(as_png(draw(**given)))
    layout = {"width": "auto"}
    dropdowns = {
        name: ipywidgets.Dropdown(
            options=values, value=given[name], description=name.replace("_", "-"), layout=layout, style=_LABEL
        )
        for name, values in offered.items()
    }

    def redraw(_) -> None:
        picture.value = as_png(draw(**{name: dropdown.value for name, dropdown in dropdowns.items()}))

    for dropdown in dropdowns.values():
        dropdown.observe(redraw, names="value")
    row = ipywidgets.HBox(list(dropdowns.values()), layout={"flex_flow": "row wrap"})
    return ipywidgets.VBox([row, picture])


def stepper(draw: Callable[[int], Figure], last: int, description: str = "step") -> ipywidgets.VBox:
    """Return a slider and a play button over the figures draw(0), …, draw(last)."""
    slider = ipywidgets.IntSlider(min=0, max=last, description=description)
    play = ipywidgets.Play(min=0, max=last, interval=1200, show_repeat=False)
    ipywidgets.jslink((play, "value"), (slider, "value"))
    picture = _picture(as_png(draw(0)))
    slider.observe(lambda change: setattr(picture, "value", as_png(draw(change["new"]))), names="value")
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), picture])


def _picture(png: bytes) -> ipywidgets.Image:
    return ipywidgets.Image(value=png, format="png", layout={"align_self": "flex-start", "max_width": "100%"})


def as_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
