"""A figure of what a partitioner sends."""

from matplotlib.figure import Figure

from shared.plots import COLORS, LINES, finish, logarithmic, new_axes


def sent_by_rows(measured_mb: dict[int, float], ways_mb: dict[str, dict[int, float]]) -> Figure:
    """Draw what a partitioner sent, by the rows of the activations, on lines of what single ways would send."""
    figure, axes = new_axes(6.0, 3.4)
    for index, (name, sent_mb) in enumerate(ways_mb.items()):
        style = {"color": COLORS[index], "linestyle": LINES[index], "linewidth": 1.8}
        axes.plot(list(sent_mb), list(sent_mb.values()), label=name, **style)
    points = {"color": "black", "marker": "o", "linestyle": "none", "markersize": 6}
    axes.plot(list(measured_mb), list(measured_mb.values()), label="your partitioner (measured)", **points)
    axes.set(xlabel="rows of the activations", ylabel="MB that a rank sends")
    logarithmic(axes)
    axes.legend(frameon=False)
    return finish(figure)
