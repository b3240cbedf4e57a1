"""What the widgets of the lessons show, drawn or computed beforehand, because a page has no kernel.

A frame is a figure for one choice. static/course.js shows the frame that the reader chooses. Widgets that draw what has
been measured on ranks, and so cannot be drawn here, keep the figure that the notebook has stored.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

from PIL import Image

from shared import planner, widgets
from shared.data import published_schedules
from shared.planner.layouts import Job, TrainingLayout, a100_hosts
from shared.planner.search import search
from shared.planner.shapes import SHAPES
from shared.plots import memory_plan, ring
from shared.plots import pipeline as pipeline_plots
from shared.tables import render
from solutions.pipeline_schedules import gpipe, one_f_one_b

FOLDER = "frames"  # beside the folders of the pages
ALL_STEPS = "In JupyterLab, you can step through this figure. Here, you see all steps at once."
RING_RANKS = 3
STAGES = 4
_DPI = 150  # A page shows 100 of these per inch, so that a figure is sharp on a screen with small pixels.
_COLORS = 96  # Figures have few colors, and a palette makes a file much smaller.


@dataclass(frozen=True)
class Choices:
    """A widget whose figure for every choice is a file."""

    name: str
    options: dict[str, list[str]]  # what can be chosen, and the values
    given: dict[str, str]
    draw: Callable[..., object]  # returns a figure for one value of each option
    note: str = ""
    is_stepper: bool = False

    def frames(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the name of each frame, such as "3-0", and its choice. The name has the index of each value."""
        for indices in product(*(range(len(values)) for values in self.options.values())):
            choice = {name: values[i] for (name, values), i in zip(self.options.items(), indices, strict=True)}
            yield "-".join(map(str, indices)), choice

    def write(self, folder: Path) -> None:
        """Write all frames into folder/frames/<name>."""
        target = folder / FOLDER / self.name
        target.mkdir(parents=True, exist_ok=True)
        for name, choice in self.frames():
            (target / f"{name}.png").write_bytes(small_png(self.draw(**choice)))

    def html(self) -> str:
        data = {"kind": "stepper" if self.is_stepper else "choices", "frames": f"../{FOLDER}/{self.name}/"}
        return _element(data | {"options": self.options, "given": self.given, "note": self.note})


@dataclass(frozen=True)
class Planner:
    """The planner of chapter 06. Its numbers are few, so that a page has all of them and draws the bars itself."""

    given: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write nothing: the page has the numbers."""

    def html(self) -> str:
        return _element({"kind": "planner", "given": self.given} | planner_numbers())


def _element(data: dict) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return render(__package__, "parts.html", part="widget", json=text)


def small_png(figure) -> bytes:
    file, small = io.BytesIO(), io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    Image.open(file).convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


# -- chapter 01


def ring_logs(size: int) -> list[list[dict]]:
    """Return what the ranks of a ring all-reduce log if rank r contributes a 1 to digit r (see `plots.ring`)."""
    names = "ABCDEFGH"[:size]
    held = [{name: "0" * rank + "1" + "0" * (size - 1 - rank) for name in names} for rank in range(size)]
    logs = [[{"sent": None, "holds": dict(holds)}] for holds in held]
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        ahead = step + 1 if adds else step - size + 1
        sent = [names[(rank - ahead) % size] for rank in range(size)]
        before = [dict(holds) for holds in held]
        for rank, holds in enumerate(held):
            chunk = sent[rank - 1]
            own = before[rank][chunk] if adds else "0" * size
            pairs = zip(before[rank - 1][chunk], own, strict=True)
            holds[chunk] = "".join(str(int(theirs) + int(mine)) for theirs, mine in pairs)
            logs[rank].append({"sent": sent[rank], "holds": dict(holds)})
    return logs


def ring_stepper() -> Choices:
    logs = ring_logs(RING_RANKS)
    steps = [str(step) for step in range(len(logs[0]))]
    return Choices(
        "ring", {"step": steps}, {"step": "0"}, lambda step: ring.ring_step(logs, int(step)), is_stepper=True
    )


# -- chapter 06


def planner_numbers() -> dict:
    """Return the bytes that the planner computes, in GB: those of the model state, and those of activations.

    The model state depends on the model, the ranks, the precision and the stage; activations on the model, the
    precision, the micro-batch, checkpointing and attention.
    """
    ranks = [2**power for power in range(11)]
    micro_batches = [1, 2, 4, 8, 16]

    def state(model: str, count: int, precision: str, stage: int) -> list[float]:
        plan = planner.plan(SHAPES[model], ranks=count, stage=stage, precision=precision)
        return [_gb(each) for each in (plan.parameters, plan.gradients, plan.optimizer, plan.gathered)]

    def activations(model: str, precision: str, size: int, how: str, attention: str) -> float:
        choice = {"precision": precision, "micro_batch": size, "checkpointing": how, "attention": attention}
        return _gb(planner.plan(SHAPES[model], ranks=1, stage=0, **choice).activations)

    return {
        "options": {
            "model": list(SHAPES),
            "ranks": [str(count) for count in ranks],
            "precision": list(planner.PRECISIONS),
            "micro-batch": [str(size) for size in micro_batches],
            "checkpointing": list(planner.CHECKPOINTING),
            "attention": list(planner.ATTENTION),
        },
        "stages": list(planner.STAGES.values()),
        "parts": {name: color for name, (color, _) in memory_plan.COMPONENT_STYLES.items()},
        "gpus": list(memory_plan.GPUS_GB),
        "state": _nested(state, SHAPES, ranks, planner.PRECISIONS, planner.STAGES),
        "activations": _nested(
            activations, SHAPES, planner.PRECISIONS, micro_batches, planner.CHECKPOINTING, planner.ATTENTION
        ),
    }


def _nested(compute: Callable, first: Iterable, *others: Iterable) -> list:
    """Return what a function computes for all combinations of arguments, as nested lists: one level per argument."""
    if not others:
        return [compute(value) for value in first]
    return [_nested(partial(compute, value), *others) for value in first]


def _gb(held_bytes: float) -> float:
    return float(f"{held_bytes / 1e9:.3g}")


def memory_planner() -> Planner:
    return Planner(
        {
            "model": "Llama-2 7B",
            "ranks": "8",
            "precision": "mixed, 16 bytes per parameter",
            "micro-batch": "1",
            "checkpointing": "full",
            "attention": "fused",
        }
    )


# -- chapter 15


def schedule_chooser() -> Choices:
    builders = {
        "GPipe": lambda m: gpipe(STAGES, m),
        "1F1B": lambda m: one_f_one_b(STAGES, m),
        "interleaved, v = 2": lambda m: published_schedules.interleaved(STAGES, m, 2),
        "interleaved, v = 4": lambda m: published_schedules.interleaved(STAGES, m, 4),
        "zero bubble": lambda m: published_schedules.zero_bubble(STAGES, m),
    }

    def draw(**choice: str):
        name, micro_batches = choice.values()
        try:
            return pipeline_plots.choice(name, builders[name](int(micro_batches)))
        except ValueError as error:
            return pipeline_plots.impossible(name, str(error))

    options = {"schedule": list(builders), "micro-batches": ["4", "8", "12", "16", "32", "64"]}
    note = f"This page has {STAGES} stages only. In JupyterLab, you can choose their number, too."
    return Choices("schedules", options, {"schedule": "1F1B", "micro-batches": "8"}, draw, note)


# -- chapter 18


def layout_chooser() -> Choices:
    hosts, gpus = 4, 32
    found = search(Job(SHAPES["Llama-2 70B"], sequences=256), a100_hosts(hosts))

    def draw(tp: str, pp: str, checkpointing: str):
        replicas = gpus // (int(tp) * int(pp))
        layout = TrainingLayout(replicas, int(pp), int(tp), zero_stage=1, checkpointing=checkpointing)
        return widgets.compared(found, {"your choice": layout})

    options = {"tp": ["2", "4", "8"], "pp": ["1", "2", "4"], "checkpointing": ["none", "full"]}
    note = "This page has one model on 32 GPUs, with ZeRO-1 and 1F1B. In JupyterLab, you can choose more."
    return Choices("layouts", options, {"tp": "8", "pp": "1", "checkpointing": "full"}, draw, note)


OFFERED = {each.__name__: each for each in (ring_stepper, memory_planner, schedule_chooser, layout_chooser)}


@cache
def offered(name: str) -> Choices | Planner | None:
    """Return what a page shows for a function of `shared.widgets`, or None if only the stored figure can be shown."""
    return OFFERED[name]() if name in OFFERED else None


def used_in(source: str) -> str:
    """Return the name of the widget that a cell displays, or ""."""
    return next((name for name in widget_names() if f"widgets.{name}(" in source), "")


def widget_names() -> list[str]:
    return [name for name in vars(widgets) if name.endswith(("_stepper", "_chooser", "_planner"))]


def html(name: str) -> str:
    """Return what a page shows for a widget, before the stored figure."""
    found = offered(name)
    return found.html() if found else f'<p class="widget-note">{ALL_STEPS}</p>'
