"""The course's figures: pure functions from data to a matplotlib Figure.

The colors are Okabe and Ito's, which color-blind readers can tell apart. Markers, line styles and hatches carry the
same information, so the figures also work in black and white.
"""

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_RANK_COLORS = ("#00639C", COLORS[4], "#1AA87D", "#EDD0E0")  # their brightness differs by equal steps


def rank_color(rank: int) -> str:
    """Return the color of a rank, which is the same in all figures. From rank 4 on, the colors repeat."""
    return _RANK_COLORS[rank % len(_RANK_COLORS)]


def rank_ink(rank: int) -> str:
    """Return the color of text on a rank's color."""
    return "white" if rank % len(_RANK_COLORS) == 0 else "black"


def finish(figure: Figure) -> Figure:
    """Close a figure and return it, so that a notebook shows it only once, as the value of the cell."""
    plt.close(figure)
    return figure


def new_axes(width_in: float, height_in: float):
    """Create a figure with one pair of axes, without the top and right spines."""
    figure, axes = plt.subplots(figsize=(width_in, height_in), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def logarithmic(axes) -> None:
    """Make both axes logarithmic, with more than one label on the y axis. Call this after everything is drawn."""
    axes.set(xscale="log", yscale="log")
    lowest, highest = axes.get_ylim()
    if highest < 4 * lowest:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest > 10 * lowest else (1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def loss_curves(curves: dict[str, list[float]], log: bool = False) -> Figure:
    """Draw the loss per step, one line per name. Staggered markers distinguish lines that coincide."""
    figure, axes = new_axes(6.0, 3.0)
    for index, (name, losses) in enumerate(curves.items()):
        every = max(len(curves), len(losses) // 8)  # at least one step per curve, so that no marker covers another
        axes.plot(
            losses,
            color=COLORS[index % len(COLORS)],
            linestyle=LINES[index % len(LINES)],
            linewidth=2.6 - 0.7 * index,
            marker=MARKERS[index % len(MARKERS)],
            markevery=(index * every // len(curves), every),
            label=name,
        )
    axes.set(xlabel="step", ylabel="loss")
    if log:  # shows small losses that differ
        axes.set(yscale="log", ylabel="loss (logarithmic)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return finish(figure)


def loss_ratio(wrong: dict[str, list[float]], right: list[float], steps: int = 20) -> Figure:
    """Draw each run's loss, divided by the right one. Both are means of the last few steps, because batches differ."""
    figure, axes = new_axes(6.0, 2.8)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    right = _running_sums(right, steps)
    for index, (name, losses) in enumerate(wrong.items()):
        ratios = [a / b for a, b in zip(_running_sums(losses, steps), right, strict=True)]
        style: dict[str, Any] = {"color": COLORS[(index + 1) % len(COLORS)], "linestyle": LINES[index % len(LINES)]}
        axes.plot(range(steps, steps + len(ratios)), ratios, linewidth=2, label=name, **style)
    axes.set(xlabel="step", ylabel="loss / right loss", title=f"means of the last {steps} steps")
    axes.legend(frameon=False)
    return finish(figure)


def _running_sums(losses: list[float], steps: int) -> list[float]:
    return [sum(losses[end - steps : end]) for end in range(steps, len(losses) + 1)]


def bars(values: dict[str, float], unit: str) -> Figure:
    """Draw one labeled bar per value."""
    figure, axes = new_axes(6.0, 0.7 + 0.42 * len(values))
    drawn = axes.barh(list(values), list(values.values()), color=COLORS[0], edgecolor="black", linewidth=0.6)
    labels = [f"{value:.3g}" if value < 999.5 else f"{value:,.0f}" for value in values.values()]
    axes.bar_label(drawn, labels, padding=4)
    axes.invert_yaxis()
    axes.set(xlabel=unit, xlim=(0, 1.15 * max(values.values())))
    return finish(figure)


def waiting(began_s: list[float], arrived_s: list[float], left_s: list[float], waits_in: str) -> Figure:
    """Draw one lane per rank: its work until it reached a collective, then its wait until the collective completed."""
    figure, axes = new_axes(6.0, 0.9 + 0.35 * len(began_s))
    start = min(began_s)
    for rank, (began, arrived, left) in enumerate(zip(began_s, arrived_s, left_s, strict=True)):
        first = rank == 0
        axes.barh(rank, arrived - began, left=began - start, height=0.6, color=COLORS[0], edgecolor="black",
                  label="working" if first else None)  # fmt: skip
        axes.barh(rank, left - arrived, left=arrived - start, height=0.6, color="white", edgecolor=COLORS[1],
                  hatch=HATCHES[1], label=f"waiting in {waits_in}" if first else None)  # fmt: skip
    axes.set(xlabel="seconds", yticks=range(len(began_s)), xlim=(0, None))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(began_s))])
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(figure)


def message_cost(sizes_bytes: list[int], times_ms: dict[str, list[float]]) -> Figure:
    """Draw time against message size on logarithmic axes, one line per name.

    The dotted line shows the time without latency: it is proportional to the size, and goes through the fastest time of
    the largest message. It begins at a fifth of the shortest time. On a single line, the first and the last time are
    written.
    """
    figure, axes = new_axes(6.0, 3.4)
    for index, (name, measured) in enumerate(times_ms.items()):
        style: dict[str, Any] = {"color": COLORS[index], "linestyle": LINES[index], "marker": MARKERS[index]}
        axes.plot(sizes_bytes, measured, label=name, linewidth=1.8, **style)
        if len(times_ms) == 1:
            for index, aligned in ((0, "left"), (-1, "right")):
                words = f"{measured[index]:.2f} ms" if measured[index] < 10 else f"{measured[index]:.0f} ms"
                place = {"xytext": (0, 7), "textcoords": "offset points", "ha": aligned, "va": "bottom"}
                axes.annotate(words, (sizes_bytes[index], measured[index]), **place)
    fastest_ms = min(measured[-1] for measured in times_ms.values())
    lowest_ms = min(min(measured) for measured in times_ms.values()) / 5
    ends_ms = [lowest_ms, fastest_ms]
    ends_bytes = [sizes_bytes[-1] * time_ms / fastest_ms for time_ms in ends_ms]
    axes.plot(ends_bytes, ends_ms, ":", color="gray", label="without latency")
    axes.set(xlabel="tensor size, bytes", ylabel="time, ms")
    logarithmic(axes)
    axes.legend(frameon=False)
    return finish(figure)


def traffic(sent_mb: list[list[float]]) -> Figure:
    """Draw a heat map of the megabytes that each rank sent to each other rank, with the value in each cell.

    Shape: sent_mb [ranks][ranks], sender first.
    """
    figure, axes = plt.subplots(figsize=(4.2, 3.4), layout="constrained")
    most = max(map(max, sent_mb)) or 1.0
    axes.imshow(sent_mb, cmap="Blues", vmin=0, vmax=2.2 * most)
    for sender, row in enumerate(sent_mb):
        for receiver, megabytes in enumerate(row):
            axes.text(receiver, sender, f"{megabytes:.3g}" if megabytes else "·", ha="center", va="center")
    names = range(len(sent_mb))
    axes.set(xlabel="receiving rank", ylabel="sending rank", xticks=names, yticks=names, title="MB sent")
    return finish(figure)


LANE_STYLES = {  # the color and hatch of each lane
    "forward": (COLORS[5], HATCHES[0]),
    "backward": (COLORS[0], HATCHES[0]),
    "optimizer": (COLORS[2], HATCHES[3]),
    "communication": (COLORS[4], HATCHES[1]),
    "all-gather": (COLORS[4], HATCHES[5]),
    "reduce-scatter": (COLORS[3], HATCHES[2]),
}
_OTHER_LANE = (COLORS[3], HATCHES[2])


def timeline(lines: list, names: list[str] | None = None, exposed: bool = True, hidden: bool = True) -> Figure:
    """Draw the ranks' timelines below each other. Each has a row of computation, with the communication below it.

    Args:
        lines: One `timeline.Timeline` per rank.
        names: Labels for the timelines, if they are not the ranks of one run. Then each begins at 0 ms.
        exposed: Whether to write the exposed time beside each timeline.
        hidden: Whether to write the hidden share, too. Leave it out if a collective lasts until somebody waits for it:
            its bar is then longer than its bytes take.

    Raises:
        ValueError: If nothing was recorded.
    """
    from shared.timeline import rows_of

    if not any(line.spans for line in lines):
        raise ValueError("There is nothing to draw. Record a step with timeline.record(...) on the ranks first.")
    rank_names = [f"rank {index if line.rank is None else line.rank}" for index, line in enumerate(lines)]
    arranged = [(name, line, rows_of(line)) for name, line in zip(names or rank_names, lines, strict=True)]
    row_in = min(0.34, 6.0 / sum(len(rows) for _, _, rows in arranged))
    figure, axes = new_axes(9.0, 0.75 + sum(row_in * len(rows) + 0.22 for _, _, rows in arranged))
    starts_s = [line.began_s if names else min(line.began_s for line in lines) for line in lines]
    end_ms = 1e3 * max(line.ended_s - start_s for line, start_s in zip(lines, starts_s, strict=True))
    words_of = _words_by_lane(arranged, end_ms) if row_in > 0.15 else {}
    ticks, seen, y = [], {}, 0.0
    for (line_name, line, rows), start_s in zip(arranged, starts_s, strict=True):
        for name, spans in rows:
            for lane in dict.fromkeys(span.lane for span in spans):
                lane_spans = [span for span in spans if span.lane == lane]
                seen.setdefault(lane, _draw_spans(axes, lane_spans, y, start_s, end_ms))
                if lane in words_of:
                    covered = line.waits if name == "compute" else []
                    _name_spans(axes, lane_spans, y, start_s, end_ms, covered, words_of[lane])
            if name == "compute" and line.waits:
                seen.setdefault("waits", _draw_waits(axes, line, y, start_s))
            ticks.append((y, line_name if name == rows[0][0] else ""))
            y += 1
        beside = f"{line.exposed_ms:.{1 if line.exposed_ms < 10 else 0}f} ms exposed" if line.communication_ms else ""
        beside += f"\n{line.overlap:.0%} hidden" if hidden and beside else ""
        beside += "\n(simulated)" if line.is_simulated and beside else ""
        axes.annotate(
            beside if exposed else "",
            (1.01, y - 0.5 - len(rows) / 2),
            xycoords=("axes fraction", "data"),
            va="center",
            size=8,
        )
        y += 0.6
    axes.set(xlabel="ms", xlim=(0, end_ms), ylim=(y - 1.0, -0.6), yticks=[position for position, _ in ticks])
    axes.set_yticklabels([label for _, label in ticks])
    axes.tick_params(axis="y", length=0)
    order = [*LANE_STYLES, *sorted(set(seen) - set(LANE_STYLES))]
    shown = [lane for lane in order if lane in seen]
    figure.legend([seen[lane] for lane in shown], shown, frameon=False, ncols=len(shown), loc="outside upper left")
    return finish(figure)


def _draw_spans(axes, spans: list, y: float, start_s: float, end_ms: float):
    """Draw the spans of one lane in one row.

    A span too short to be seen is drawn as a hairline. If another one ends where it begins, the hairline covers the end
    of that one. Otherwise the lane would seem to last until after the next lane's beginning.
    """
    color, hatch = LANE_STYLES.get(spans[0].lane, _OTHER_LANE)
    shortest_ms = 3 * _VISIBLE * end_ms
    bars, previous_ms = [], float("-inf")
    for span in spans:
        began_ms, ended_ms = 1e3 * (span.began_s - start_s), 1e3 * (span.ended_s - start_s)
        if ended_ms - began_ms < shortest_ms and began_ms - previous_ms < shortest_ms:
            began_ms = ended_ms - shortest_ms
        if hatch and abs(began_ms - previous_ms) < shortest_ms < ended_ms - began_ms:
            # The white edges of two bars without a gap cannot be told from their hatch.
            axes.plot([began_ms, began_ms], [y - 0.45, y + 0.45], color="black", linewidth=0.8)
        bars.append((began_ms, max(ended_ms - began_ms, shortest_ms)))
        previous_ms = ended_ms
    # This uses facecolor, because color would draw the hatch in the bar's own color.
    return axes.broken_barh(bars, (y - 0.45, 0.9), facecolor=color, hatch=hatch, edgecolor="white", linewidth=0.5)


def _name_spans(axes, spans: list, y: float, start_s: float, end_ms: float, covered: list, words_of) -> None:
    """Write their names on the spans of one lane in one row that have room for them.

    Args:
        covered: The intervals of time in which waiting is drawn over the spans, and would hide a name.
        words_of: A function that returns what to write for a name.
    """
    color, hatch = LANE_STYLES.get(spans[0].lane, _OTHER_LANE)
    ink = "white" if spans[0].lane == "backward" else "black"
    backing = {"facecolor": color, "edgecolor": "none", "pad": 0.8} if hatch else None
    for span in spans:
        words = words_of(span.name)
        if len(words) < _letters(span, covered, end_ms):
            middle_ms = 1e3 * (sum(_longest_uncovered(span, covered)) / 2 - start_s)
            axes.text(middle_ms, y, words, ha="center", va="center", size=8.5, color=ink, bbox=backing)


def _words_by_lane(arranged: list, end_ms: float) -> dict[str, Callable[[str], str]]:
    """Return for each lane what to write for a name: the whole name if there is room for it, or else a short one.

    Lanes in which most spans have no room for a short name are left out.
    """
    rooms: dict[str, list[tuple[str, float]]] = {}
    for _, line, rows in arranged:
        for row, spans in rows:
            for span in spans:
                room = _letters(span, line.waits if row == "compute" else [], end_ms)
                rooms.setdefault(span.lane, []).append((span.name, room))
    words_of = {}
    for lane, found in rooms.items():
        named = [(name, room) for name, room in found if room > len(_short_name(name))]
        if 2 * len(named) > len(found):
            words_of[lane] = str if all(room > len(name) for name, room in named) else _short_name
    return words_of


def _letters(span, covered: list, end_ms: float) -> float:
    """Return how many letters fit on a span."""
    began_s, ended_s = _longest_uncovered(span, covered)
    return 1e3 * (ended_s - began_s) / (0.011 * end_ms)


def _short_name(name: str) -> str:
    """Shorten "all-reduce 4" to "4", and "send to 3" to an arrow and 3. A name without a space stays whole."""
    first, _, last = name.rpartition(" ")
    return {"send to": "→", "recv from": "←"}.get(first, "") + last


def _longest_uncovered(span, covered: list) -> tuple[float, float]:
    """Return when the longest part of a span begins and ends that none of the intervals covers."""
    parts, began_s = [], span.began_s
    for covered_from_s, covered_to_s in sorted(covered):
        parts.append((began_s, min(covered_from_s, span.ended_s)))
        began_s = max(began_s, covered_to_s)
    parts.append((began_s, span.ended_s))
    return max(parts, key=lambda part: part[1] - part[0])


def _draw_waits(axes, line, y: float, start_s: float):
    spans = [(1e3 * (began - start_s), 1e3 * (ended - began)) for began, ended in line.waits]
    style = {"facecolor": "white", "edgecolor": "black", "hatch": HATCHES[4], "linewidth": 0.5}
    return axes.broken_barh(spans, (y - 0.25, 0.5), zorder=4, **style)  # above the names of the spans


_VISIBLE = 1 / 500  # the smallest share of a figure's width or height that can be seen
_ROOM_FOR_A_PHASE = 0.12  # the share of a figure's width that the name of a phase needs
_LASTING = ("parameters", "optimizer")  # at the bottom of a figure over time, so that they do not move up and down


def _component_styles(components: list[str]) -> dict[str, dict]:
    """Give each memory component a color and a hatch. The last one, for everything else, is white."""
    colors, hatches = (*COLORS[: len(components) - 1], "white"), (*HATCHES[: len(components) - 1], "")
    styles = zip(components, colors, hatches, strict=True)
    return {
        name: {"facecolor": color, "hatch": hatch, "edgecolor": "white" if color in COLORS[1:3] else "black"}
        for name, color, hatch in styles
    }


def memory_by_component(held_bytes: dict[str, dict[str, int]]) -> Figure:
    """Draw one bar per rank (or strategy), with its components stacked and its total at the end.

    Args:
        held_bytes: The bytes by component, as returned by `memory.Held.by_component`, by name of the bar.

    Raises:
        ValueError: If there is no bar.
    """
    if not held_bytes:
        raise ValueError("There is nothing to draw: give at least one name with its bytes by component.")
    figure, axes = new_axes(7.0, 0.9 + 0.42 * len(held_bytes))
    totals = [sum(parts.values()) for parts in held_bytes.values()]
    scale, unit = (1e6, "MB") if max(totals) >= 1e6 else (1e3, "KB")
    components = list(next(iter(held_bytes.values())))
    left = [0.0] * len(totals)
    for component, style in _component_styles(components).items():
        widths = [parts[component] / scale for parts in held_bytes.values()]
        if max(widths) > _VISIBLE * max(totals) / scale:
            axes.barh(list(held_bytes), widths, left=left, height=0.65, linewidth=0.6, label=component, **style)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.3g}", va="center")
    axes.invert_yaxis()
    axes.set(xlabel=unit, xlim=(0, 1.2 * max(left) or 1.0))  # with room for a total
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(figure)


def memory_over_step(samples: list, compared_with: tuple[str, int] | None = None) -> Figure:
    """Draw the memory in use after each operator of a step, by component, with the phases and the peak marked.

    From bottom to top, the order is that of the diagram `training_memory`: what lasts comes first.

    Args:
        samples: The samples of a `memory.peak`.
        compared_with: The name and the bytes of another step's peak, which is drawn as a dashed line.

    Raises:
        ValueError: If there are no samples.
    """
    if not samples:
        raise ValueError("There are no samples to draw. A memory.peak has samples only after its with-block has ended.")
    figure, axes = new_axes(8.0, 3.6)
    totals = [sample.held.total_bytes for sample in samples]
    scale, unit = (1e6, "MB") if max(totals) >= 1e6 else (1e3, "KB")
    drawn = {name: [] for name in samples[0].held.by_component()}
    for sample in samples:
        for name, held_bytes in sample.held.by_component().items():
            drawn[name].append(held_bytes / scale)
    base = [0.0] * len(samples)
    styles = _component_styles(list(drawn))
    for name in sorted(drawn, key=lambda component: component not in _LASTING):  # the others keep their order
        top = [low + height for low, height in zip(base, drawn[name], strict=True)]
        if max(drawn[name]) > _VISIBLE * max(totals) / scale:
            axes.fill_between(range(len(top)), base, top, step="post", linewidth=0.4, label=name, **styles[name])
        base = top
    starts = [index for index, sample in enumerate(samples) if not index or sample.phase != samples[index - 1].phase]
    for start, following in zip(starts[1:], [*starts[2:], len(samples)], strict=False):  # of one phase, none
        axes.axvline(start, color="black", linestyle=":", linewidth=1.0)
        height = 1.02 if following - start > _ROOM_FOR_A_PHASE * len(samples) else 1.09  # above its neighbor's name
        axes.text(start, height, f" {samples[start].phase}", transform=axes.get_xaxis_transform())
    peak = max(range(len(totals)), key=totals.__getitem__)
    axes.plot(peak, totals[peak] / scale, marker="v", color="black")
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides the line behind the text
    ends_near_the_legend = peak > 0.85 * len(samples)
    words = f" peak: {totals[peak] / scale:.3g} {unit}"
    axes.text(peak, 1.04 * totals[peak] / scale, words, bbox=white, ha="right" if ends_near_the_legend else "left")
    axes.set(xlabel="operators since the start of the step (not time)", ylabel=unit)
    name, other_bytes = compared_with or ("", 0)
    if other_bytes:
        axes.axhline(other_bytes / scale, color="0.5", linestyle="--", linewidth=1.0)
        words = f"{name}: {other_bytes / scale:.3g} {unit}"
        axes.text(len(samples) - 1, 1.02 * other_bytes / scale, words, color="0.4", ha="right")
    top = max(1.2 * totals[peak], 1.12 * other_bytes)
    axes.set(xlim=(0, len(samples) - 1), ylim=(0, top / scale or 1.0))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(figure)
