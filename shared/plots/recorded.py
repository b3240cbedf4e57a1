"""A figure of a training step that was recorded with a profiler: the host, the kernels and the collectives per rank."""

from matplotlib.figure import Figure

from shared.plots import COLORS, LANE_STYLES, finish, new_axes
from shared.timeline import COMMUNICATION_LANES, COMPUTE_LANES
from shared.timeline.recordings import HOST, LAUNCH

ROWS = {"compute": COMPUTE_LANES, "communication": COMMUNICATION_LANES}  # the lanes of each row below the host's
_VISIBLE = 1 / 500  # the smallest share of the figure's width that can be seen
_LETTER = 0.0105  # the share of the figure's width that a letter needs
_SHORT = {"finish_gradient_sync": "finish", "optimizer.step": "step", "wait for the GPU": "wait"}


def step(recording) -> Figure:
    """Draw a recorded step: per rank a row for the host, one for the kernels that compute, and one for collectives.

    Kernels of one phase are drawn as one bar where the gaps between them are too short to be seen. The marks in the
    host's row are its launches of collectives.

    Args:
        recording: A `timeline.recordings.Recording`.
    """
    lines = recording.lines
    figure, axes = new_axes(9.0, 1.1 + 1.05 * len(lines))
    start_s, end_s = min(line.began_s for line in lines), max(line.ended_s for line in lines)
    end_ms = 1e3 * (end_s - start_s)
    narrow = {lane for lane in COMMUNICATION_LANES if _is_narrow(lines, lane, end_ms / 1e3)}
    seen, ticks, y = {}, [], 0.0
    for line in lines:
        _draw_host(axes, line, y, start_s, end_ms, seen)
        ticks.append((y, f"rank {line.rank} · host"))
        for row, lanes in ROWS.items():
            y += 1
            _draw_lanes(axes, line, lanes, narrow, y, start_s, end_ms, seen)
            ticks.append((y, row))
        y += 1
        exposed = f"{line.exposed_ms:.1f} ms exposed\n{line.overlap:.0%} hidden" if line.communication_ms else ""
        axes.annotate(exposed, (1.01, y - 2), xycoords=("axes fraction", "data"), va="center", size=8)
        y += 0.5
    axes.set(xlabel="ms", xlim=(0, end_ms), ylim=(y - 1.0, -0.6), yticks=[position for position, _ in ticks])
    axes.set_yticklabels([label for _, label in ticks], size=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_title(recording.title, size=9, loc="left")
    order = [lane for lane in (*LANE_STYLES, LAUNCH) if lane in seen]
    labels = ["launch of a collective" if lane == LAUNCH else lane for lane in order]
    figure.legend([seen[lane] for lane in order], labels, frameon=False, ncols=len(order), loc="outside lower left")
    return finish(figure)


def _draw_host(axes, line, y: float, start_s: float, end_ms: float, seen: dict) -> None:
    """Draw the phases of the host, with their names, and a mark for each launch of a collective."""
    for span in line.spans:
        began_ms, took_ms = 1e3 * (span.began_s - start_s), 1e3 * (span.ended_s - span.began_s)
        if span.lane == HOST and took_ms > 0:
            axes.broken_barh([(began_ms, took_ms)], (y - 0.4, 0.8), facecolor="0.93", edgecolor="0.4", linewidth=0.6)
            names: tuple[str, ...] = (span.name, _SHORT.get(span.name) or span.name)
            if name := next((name for name in names if len(name) * _LETTER * end_ms < took_ms), ""):
                axes.text(began_ms + took_ms / 2, y - 0.08, name, ha="center", va="center", size=8)
    marks = [1e3 * (span.began_s - start_s) for span in line.spans if span.lane == LAUNCH]
    if marks:
        style = {"color": COLORS[1], "linewidth": 1.0}
        seen.setdefault(LAUNCH, axes.vlines(marks, y + 0.14, y + 0.4, zorder=4, **style))


def _is_narrow(lines: list, lane: str, whole_s: float) -> bool:
    """Return whether most bars of a lane are as narrow as the lines of a hatch, which would hide everything else."""
    spans = [span for line in lines for span in line.spans if span.lane == lane]
    return sum(span.ended_s - span.began_s < 6 * _VISIBLE * whole_s for span in spans) > len(spans) / 2


def _draw_lanes(axes, line, lanes, narrow: set, y: float, start_s: float, end_ms: float, seen: dict) -> None:
    """Draw the kernels of some lanes in one row, and write their numbers on collectives that have room for them.

    Args:
        narrow: The lanes whose bars are too narrow for a hatch and for black edges.
    """
    for lane in lanes:
        bars = [(1e3 * (began_s - start_s), 1e3 * (ended_s - began_s)) for began_s, ended_s in line.lane(lane)]
        if not bars:
            continue
        if lane in COMPUTE_LANES:
            bars = _joined(bars, _VISIBLE * end_ms)
        bars = [(began_ms, max(took_ms, _VISIBLE * end_ms)) for began_ms, took_ms in bars]
        color, hatch = LANE_STYLES[lane]
        edges = "black" if lane in COMMUNICATION_LANES and lane not in narrow else color
        style = {"facecolor": color, "edgecolor": edges, "linewidth": 0.5, "hatch": "" if lane in narrow else hatch}
        seen.setdefault(lane, axes.broken_barh(bars, (y - 0.4, 0.8), **style))
        if lane in COMMUNICATION_LANES:
            _number(axes, [span for span in line.spans if span.lane == lane], y, start_s, end_ms)


def _joined(bars: list[tuple[float, float]], shortest_ms: float) -> list[tuple[float, float]]:
    """Join bars with gaps that are too short to be seen."""
    joined: list[tuple[float, float]] = []
    for began_ms, took_ms in bars:
        if joined and began_ms - sum(joined[-1]) < shortest_ms:
            first_ms = joined[-1][0]
            joined[-1] = (first_ms, max(sum(joined[-1]), began_ms + took_ms) - first_ms)
        else:
            joined.append((began_ms, took_ms))
    return joined


def _number(axes, spans: list, y: float, start_s: float, end_ms: float) -> None:
    """Write the numbers of collectives, except where two of them run at once, as they may over gloo."""
    for index, span in enumerate(spans):
        alone = all(other.ended_s <= span.began_s for other in spans[:index])
        alone = alone and all(other.began_s >= span.ended_s for other in spans[index + 1 :])
        number = span.name.rpartition(" ")[2]
        took_ms = 1e3 * (span.ended_s - span.began_s)
        if alone and (len(number) + 1) * _LETTER * end_ms < took_ms:
            backing = {"facecolor": LANE_STYLES[span.lane][0], "edgecolor": "none", "pad": 0.8}
            middle_ms = 1e3 * (span.began_s - start_s) + took_ms / 2
            axes.text(middle_ms, y, number, ha="center", va="center", size=8, bbox=backing)
