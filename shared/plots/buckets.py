"""Figures of gradient buckets: which gradients are reduced together, and what each cap costs.

The order of the buckets is what matters, so the first one is the darkest, and the last one the lightest, of one hue.
Where there is room, a bucket has its number. The figures also work in black-and-white print.
"""

from dataclasses import dataclass
from itertools import accumulate

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from shared.plots import COLORS, HATCHES, MARKERS

# Five colors and six hatches: no combination repeats within thirty buckets. The brightness of neighbors differs.
_FILLS = (COLORS[5], COLORS[1], COLORS[4], COLORS[0], COLORS[3])
_MANY = 20  # the most buckets that shades can tell apart


def bucket_style(number: int) -> dict:
    """Return the color and hatch of a bucket in a diagram. Buckets are numbered from 1."""
    color, hatch = _FILLS[(number - 1) % len(_FILLS)], HATCHES[(number - 1) % len(HATCHES)]
    return {"facecolor": color, "hatch": hatch, "edgecolor": "white"}


def shade(number: int, of: int) -> tuple:
    """Return the color of a bucket among all of them: dark for bucket 1, and light for the last one."""
    lightness = 0.85 * (number - 1) / max(of - 1, 1)
    blue = [0.75 * channel for channel in to_rgb(COLORS[0])]
    return tuple(channel + lightness * (1 - channel) for channel in blue)


@dataclass(frozen=True)
class CapRun:
    """The results for one cap: its buckets, and when the all-reduce of each one was in flight."""

    cap: str
    buckets: list[list[str]]  # names of parameters, in launch order
    spans_ms: list[tuple[float, float]]  # (began, ended) of each bucket
    predicted_ms: float

    @property
    def took_ms(self) -> float:
        return max(ended for _, ended in self.spans_ms)


def runs_of(
    model, by_cap: dict[str, list], logs: dict[str, list], alpha_ms: float, ns_per_byte: float
) -> tuple[dict[str, int], list[CapRun]]:
    """Return the bytes of a model's parameters, and a run for each cap. α and β of an all-reduce predict its time.

    Args:
        by_cap: The buckets of parameters, in launch order.
        logs: One ledger per rank. The first one counts.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    runs = []
    for cap, buckets in by_cap.items():
        entries = logs[cap][0].entries
        began_s = entries[0].launched_s
        spans_ms = [(1e3 * (e.launched_s - began_s), 1e3 * (e.completed_s - began_s)) for e in entries]
        predicted_ms = sum(alpha_ms + 1e-6 * ns_per_byte * entry.payload_bytes for entry in entries)
        named = [[names[parameter] for parameter in bucket] for bucket in buckets]
        runs.append(CapRun(cap, named, spans_ms, predicted_ms))
    return {name: parameter.nbytes for parameter, name in names.items()}, runs


def cap_run(sizes_bytes: dict[str, int], runs: list[CapRun], index: int) -> Figure:
    """Draw one cap: its bucket map, and below it its all-reduces on a time axis common to all caps."""
    run = runs[index]
    rows = units(sizes_bytes)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.0, 1.9 + 0.24 * len(rows)), height_ratios=[len(rows), 2.2], layout="constrained"
    )
    draw_map(above, sizes_bytes, run.buckets)
    above.set_title(f"cap {run.cap}: {_count(run)}, {run.took_ms:.1f} ms measured, {run.predicted_ms:.1f} ms predicted")
    for number, (began_ms, ended_ms) in enumerate(run.spans_ms, 1):
        _draw_bucket(
            below, [(began_ms, ended_ms - began_ms)], 0, number, len(run.spans_ms), narrow=0.025 * _longest_ms(runs)
        )
    below.axvline(run.predicted_ms, color="black", linestyle=":", linewidth=1.2)
    below.text(run.predicted_ms, 0.55, " predicted", size=8, va="bottom")
    below.set(
        xlabel="ms since the launch of the first all-reduce", yticks=[], ylim=(-0.6, 1.0), xlim=(0, _longest_ms(runs))
    )
    below.spines[["top", "right", "left"]].set_visible(False)
    plt.close(figure)
    return figure


def cap_runs(sizes_bytes: dict[str, int], runs: list[CapRun]) -> Figure:
    """Draw one row per cap: the model as a strip of buckets, and how long the all-reduces took.

    White lines separate the gradients in a bucket.
    """
    height_in = 1.0 + 0.42 * len(runs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, height_in), sharey=True, layout="constrained")
    widths = list(sizes_bytes.values())
    starts = dict(zip(sizes_bytes, accumulate(widths, initial=0), strict=False))
    for y, run in enumerate(runs):
        narrow = (0.045 if len(run.buckets) > 9 else 0.03) * sum(widths) / 1e6  # two digits need more room
        for number, bucket in enumerate(run.buckets, 1):
            spans = [(starts[name] / 1e6, sizes_bytes[name] / 1e6) for name in bucket]
            _draw_bucket(left, spans, y, number, len(run.buckets), narrow)
        right.barh(y, run.took_ms, height=0.6, color=COLORS[0], edgecolor="black", linewidth=0.6,
                   label="" if y else "measured")  # fmt: skip
        right.plot(run.predicted_ms, y, MARKERS[3], color=COLORS[4], markeredgecolor="black", linestyle="none",
                   label="" if y else "predicted")  # fmt: skip
        furthest = max(run.took_ms, run.predicted_ms)
        label = f"{_count(run)}, {run.took_ms:.0f} ms"
        right.annotate(label, (furthest, y), xytext=(9, 0), textcoords="offset points", va="center", size=9)
    left.set(xlabel="gradients in the model's order, MB", yticks=range(len(runs)))
    left.set_yticklabels([run.cap for run in runs])
    left.set_ylabel("cap")
    left.invert_yaxis()
    right.set(xlim=(0, 1.6 * _longest_ms(runs)))  # the labels need room
    right.set_xticks([ms for ms in right.get_xticks() if ms <= _longest_ms(runs)])
    right.spines["bottom"].set_bounds(0, _longest_ms(runs))
    right.set_xlabel("ms until the last all-reduce ends", x=0.5 / 1.6)
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    plt.close(figure)
    return figure


def units(sizes_bytes: dict[str, int]) -> dict[str, list[str]]:
    """Group parameters by the unit of the model that contains them: `blocks.3.up.weight` belongs to `blocks.3`."""
    rows: dict[str, list[str]] = {}
    for name in sizes_bytes:
        words = name.split(".")
        numbered = len(words) > 1 and words[1].isdigit()
        rows.setdefault(".".join(words[: 1 + numbered]), []).append(name)
    return rows


def draw_map(axes, sizes_bytes: dict[str, int], buckets: list[list[str]]) -> None:
    """Draw a model as rows of parameters in their own order, as wide as their bytes and colored by bucket.

    Args:
        sizes_bytes: The bytes of each parameter, by name.
        buckets: Names of parameters, in the order in which the buckets are launched. They are numbered from 1.
    """
    number_of = {name: number for number, bucket in enumerate(buckets, 1) for name in bucket}
    rows = units(sizes_bytes)
    widest = max(sum(sizes_bytes[name] for name in names) for names in rows.values()) / 1024
    for y, names in enumerate(rows.values()):
        starts = accumulate((sizes_bytes[name] for name in names), initial=0)
        spans: dict[int, list] = {}
        for name, start in zip(names, starts, strict=False):
            width = max(sizes_bytes[name] / 1024, 0.004 * widest)  # otherwise a LayerNorm would be invisible
            spans.setdefault(number_of.get(name, 0), []).append((start / 1024, width))
        for number, bucket_spans in spans.items():
            _draw_bucket(axes, bucket_spans, y, number, len(buckets), narrow=0.03 * widest)
        end = max(start + width for bucket_spans in spans.values() for start, width in bucket_spans)
        if len(spans) == 1 and number and end <= 0.03 * widest:
            axes.text(end + 0.01 * widest, y, str(number), va="center", size=7.5)  # there is no room in the bar
    axes.set(xlabel="gradients, KiB", yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.01 * widest))
    axes.set_yticklabels(list(rows))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bucket(axes, spans: list[tuple[float, float]], y: float, number: int, of: int, narrow: float) -> None:
    """Draw a bucket's gradients in one row, with its number on each contiguous run that has room for it.

    Args:
        number: The bucket's number, or 0 for gradients that are in no bucket.
        of: The number of buckets. Many narrow buckets are gray, because their shades would look alike.
    """
    if not number:
        style = {"facecolor": "white", "edgecolor": "black"}
    elif of > _MANY:
        style = {"facecolor": ("0.45", "0.75")[number % 2], "edgecolor": "none"}
    else:
        style = {"facecolor": shade(number, of), "edgecolor": "white"}
    joined = _joined(spans) if of > _MANY else spans
    axes.broken_barh(joined, (y - 0.42, 0.84), linewidth=0.4, **style)
    for start, width in _joined(spans):
        if number and width > narrow:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.text(start + width / 2, y, str(number), ha="center", va="center", size=7.5, bbox=box)


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans that touch."""
    joined: list[tuple[float, float]] = []
    for start, width in sorted(spans):
        if joined and abs(sum(joined[-1]) - start) < 1e-9 * max(1.0, start):
            joined[-1] = (joined[-1][0], joined[-1][1] + width)
        else:
            joined.append((start, width))
    return joined


def _longest_ms(runs: list[CapRun]) -> float:
    return max(max(run.took_ms, run.predicted_ms) for run in runs)


def _count(run: CapRun) -> str:
    return f"{len(run.buckets)} all-reduce{'s' if len(run.buckets) > 1 else ''}"
