"""Things to move with the mouse: each a thin layer of ipywidgets over a pure figure function of `*plots.py`.

    widgets.ring_stepper(ranks.pull("log"))    # as the last line of a cell

Each function gives back a static figure that says the same as its widget. It is the cell's value, so it is what a
notebook file keeps, and what a reader without a kernel sees. The widget itself is shown above it, only where somebody
runs the cell in JupyterLab. For a file that keeps a widget's view reads "Error displaying widget" wherever its kernel
is gone: that must not happen to the notebooks we build. (In a student's own copy, running the cell again cures it.)
"""

import io
from collections.abc import Callable
from functools import partial

import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure

from shared import bucket_plots, magic, plots


def ring_stepper(logs: list) -> Figure:
    """Step through a ring, as `plots.ring_step` draws it. → all steps side by side

    Shapes: logs: [ranks][1 + steps]; see `plots.ring_step`.
    """
    if magic.in_jupyterlab():
        display(stepper(lambda step: plots.ring_step(logs, step), last=len(logs[0]) - 1))
    return plots.ring_steps(logs)


def cap_chooser(sizes_bytes: dict[str, int], runs: list[bucket_plots.CapRun]) -> Figure:
    """Choose a cap: its buckets and its messages, as `bucket_plots.cap_run` draws them. → all caps below each other"""
    if magic.in_jupyterlab():
        draw = partial(bucket_plots.cap_run, sizes_bytes, runs)
        display(stepper(draw, last=len(runs) - 1, description="cap"))
    return bucket_plots.cap_runs(sizes_bytes, runs)


def stepper(draw: Callable[[int], Figure], last: int, description: str = "step") -> ipywidgets.VBox:
    """A slider and a play button over draw(0), …, draw(last)."""
    slider = ipywidgets.IntSlider(min=0, max=last, description=description)
    play = ipywidgets.Play(min=0, max=last, interval=1200, show_repeat=False)
    ipywidgets.jslink((play, "value"), (slider, "value"))
    picture = ipywidgets.Image(
        value=as_png(draw(0)), format="png", layout={"align_self": "flex-start", "max_width": "100%"}
    )
    slider.observe(lambda change: setattr(picture, "value", as_png(draw(change["new"]))), names="value")
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), picture])


def as_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
