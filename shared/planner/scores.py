"""Fits the planner's constants to some published runs, and tests it on the others.

    scores.fit()                # the constants that layouts.py contains
    scores.figure()             # how wrong the planner is for each run, by source

An error of +5% means that the planner predicts a step which takes 5% longer than the published one.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from matplotlib.figure import Figure

from shared.planner import layouts
from shared.planner.layouts import Gpu
from shared.planner.published import RUNS, Published
from shared.plots import layouts as layout_plots

EFFICIENCIES = [percent / 1000 for percent in range(400, 900, 5)]
PASSES = [half / 2 for half in range(1, 30)]


def error(run: Published, gpu: Gpu | None = None) -> float:
    """Return the predicted time of a run's step over the published one, minus 1."""
    cluster = replace(run.cluster, gpu=gpu or run.cluster.gpu)
    return layouts.step_time(run.job, run.layout, cluster).total_s / run.step_s - 1


def fit() -> dict[str, float]:
    """Find the constants that minimize the squares of the logarithms of predicted over published time.

    The two constants of the A100 are fitted to five runs. Those of the H100 differ only in the efficiency, which is
    fitted to one run.
    """
    a100_runs = [run for run in RUNS if run.fits and run.cluster.gpu.name == "A100"]
    h100_runs = [run for run in RUNS if run.fits and run.cluster.gpu.name == "H100"]

    def loss(runs: list[Published], gpu: Gpu) -> float:
        return sum(math.log1p(error(run, gpu)) ** 2 for run in runs)

    pairs = [(efficiency, passes) for efficiency in EFFICIENCIES for passes in PASSES]
    a100, passes = _least(
        lambda pair: loss(a100_runs, replace(layouts.A100, efficiency=pair[0], activation_passes=pair[1])), pairs
    )
    h100 = _least(
        lambda value: loss(h100_runs, replace(layouts.H100, efficiency=value, activation_passes=passes)), EFFICIENCIES
    )
    return {"A100_EFFICIENCY": a100, "H100_EFFICIENCY": h100, "ACTIVATION_PASSES": passes}


def _least(loss: Callable, values: list):
    return min(values, key=loss)


def groups() -> dict[str, list[Published]]:
    """Return the runs that were fitted, and then the others by their source, the smallest cluster first."""
    found: dict[str, list[Published]] = {"fitted": [run for run in RUNS if run.fits]}
    for run in RUNS:
        paper = run.source.split(",")[0] + (", ZeRO-3" if "ZeRO-3" in run.name else "")
        if not run.fits:
            found.setdefault(paper, []).append(run)
    return {name: sorted(runs, key=lambda run: run.cluster.gpus) for name, runs in found.items()}


def figure() -> Figure:
    """Draw the error of each run, fitted or not."""
    return layout_plots.errors({name: [error(run) for run in runs] for name, runs in groups().items()})
