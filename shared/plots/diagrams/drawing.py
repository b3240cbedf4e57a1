"""The shapes that all diagrams are made of: boxes, cells, arrows and spans of time, in one style.

A diagram has at most six colors. A cell that a rank owns has the rank's color and number, so that it can also be
read in a gray printout.
"""

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from shared.plots import COLORS, finish, rank_color, rank_ink

PAPER = "0.95"  # the inside of a box that contains other shapes
MESSAGE = COLORS[1]
CELL_IN = (0.5, 0.38)  # width and height of a cell
COMPUTE = "0.85"  # a span in which a rank computes, in diagrams whose colors stand for ranks
WAITS: dict[str, Any] = {"hatch": "\\\\", "edgecolor": "0.35"}  # the style of a span in which a rank computes nothing
WORLD_SIZE = 4  # the number of ranks in a diagram
OWN_RANK = 1  # the rank whose memory is shown, in diagrams that show one rank over time
STRIPE_IN = 0.11  # the height of a shard in such a diagram
_SIZES = {"title": 12.5, "heading": 11.0, "label": 10.0, "note": 9.5}


class Drawing:
    """A figure measured in inches, with x from the left and y from the top, so that text fits its shapes."""

    def __init__(self, width_in: float, height_in: float, title: str):
        self.width_in = width_in
        self._figure = plt.figure(figsize=(width_in, height_in))
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, width_in), ylim=(height_in, 0))
        self._axes.axis("off")
        self.text(0.15, 0.25, title, "title", ha="left", weight="bold")

    def finish(self) -> Figure:
        """Return the figure, closed."""
        return finish(self._figure)

    def text(self, x: float, y: float, words: str, kind: str = "label", **style) -> None:
        """Write words around (x, y), in the size of their kind: title, heading, label or note."""
        style = {"ha": "center", "va": "center", "color": "black", "size": _SIZES[kind]} | style
        self._axes.text(x, y, words, **style)

    def code(self, x: float, y: float, words: str, **style) -> None:
        """Write code around (x, y)."""
        self.text(x, y, words, family="monospace", **style)

    def name_rows(self, *rows: tuple[float, str, str]) -> None:
        """Write on the left what each row shows, as (y, name, explanation)."""
        for y, name, explanation in rows:
            self.text(0.15, y + 0.1, name, "heading", ha="left", weight="bold")
            self.text(0.15, y + 0.26, explanation, "note", ha="left", va="top", linespacing=1.3)

    def box(self, x: float, y: float, width: float, height: float, **style) -> None:
        """Draw a box with round corners and its top left corner at (x, y). Other shapes are drawn on top of it."""
        style = {"facecolor": PAPER, "edgecolor": "0.35", "linewidth": 0.8, "zorder": 0.5} | style
        round_corners = "round,pad=0,rounding_size=0.07"
        self._axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=round_corners, **style))

    def rank_label(self, x: float, y: float, rank: int, width: float = 0.72, height: float = CELL_IN[1]) -> None:
        """Draw a rank's name on its color."""
        self.box(x, y, width, height, facecolor=rank_color(rank), edgecolor="black", zorder=1)
        self.text(x + width / 2, y + height / 2, f"rank {rank}", color=rank_ink(rank), weight="bold")

    def cell(
        self, x: float, y: float, words: str, ranks: tuple[int, ...] = (), size_in: tuple[float, float] = CELL_IN
    ) -> None:
        """Draw a cell with its top left corner at (x, y), in the color of the rank that its element came from.

        An element from several ranks is a sum: its cell is white, with a band in the colors of these ranks. A cell
        without ranks is white.
        """
        width, height = size_in
        band_y = y if len(ranks) == 1 else y + 0.7 * height
        self._axes.add_patch(Rectangle((x, y), width, height, facecolor="white", linewidth=0))
        for index, rank in enumerate(ranks):
            stripe = width / len(ranks)
            style = {"facecolor": rank_color(rank), "linewidth": 0}
            self._axes.add_patch(Rectangle((x + index * stripe, band_y), stripe, y + height - band_y, **style))
        frame = {"facecolor": "none", "edgecolor": "black", "linewidth": 0.8}
        self._axes.add_patch(Rectangle((x, y), width, height, **frame))
        ink = rank_ink(ranks[0]) if len(ranks) == 1 else "black"
        self.text(x + width / 2, (y + band_y) / 2 if len(ranks) > 1 else y + height / 2, words, color=ink)

    def absent(self, x: float, y: float, size_in: tuple[float, float] = CELL_IN) -> None:
        """Draw the dashed outline of a cell for which a rank has no memory."""
        style = {"facecolor": "none", "edgecolor": "0.45", "linewidth": 0.9, "linestyle": (0, (3, 2))}
        self._axes.add_patch(Rectangle((x, y), *size_in, **style))

    def shards(self, x: float, y: float, width: float, ranks: Iterable[int]) -> None:
        """Draw memory over time: a stripe for each of these ranks' shards of a flat tensor that begins at y."""
        for rank in ranks:
            self.span(x, y + STRIPE_IN * rank, width, STRIPE_IN, facecolor=rank_color(rank))

    def collective(self, x: float, y: float, width: float, words: str, height: float = 0.34) -> None:
        """Draw a collective as a bar across the ranks that take part."""
        style = {"facecolor": "white", "edgecolor": MESSAGE, "linewidth": 1.8, "zorder": 1}
        self.box(x, y, width, height, **style)
        self.text(x + width / 2, y + height / 2, words)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], **style) -> None:
        """Draw an arrow that is not a message: it shows what happens to something on the same rank."""
        shape = {"arrowstyle": "-|>", "color": "0.25", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        self._axes.annotate("", end, start, arrowprops=shape | style)

    def message(self, start: tuple[float, float], end: tuple[float, float], **style) -> None:
        """Draw an arrow for a message from one rank to another."""
        self.arrow(start, end, **({"color": MESSAGE, "linewidth": 1.5} | style))

    def line(self, start: tuple[float, float], end: tuple[float, float], **style) -> None:
        """Draw a line without heads."""
        (x, y), (end_x, end_y) = start, end
        self._axes.plot([x, end_x], [y, end_y], **({"color": "0.25", "linewidth": 1.0} | style))

    def span(self, x: float, y: float, width: float, height: float, words: str = "", **style) -> None:
        """Draw a stretch of time, or of memory, with words where they can be read on its color and hatch."""
        ink, size = style.pop("ink", "black"), style.pop("size", _SIZES["label"])
        style = {"facecolor": "white", "edgecolor": "white", "linewidth": 0.8} | style
        self._axes.add_patch(Rectangle((x, y), width, height, **style))
        self._axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor="black", linewidth=0.8))
        backing = {"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.12"}
        bbox = backing if style.get("hatch") else None
        if words:
            self.text(x + width / 2, y + height / 2, words, color="black" if bbox else ink, bbox=bbox, size=size)


class Clock:
    """Converts times to positions in a drawing."""

    def __init__(self, left_in: float, right_in: float, began_ms: float, ended_ms: float):
        self.left_in, self.right_in, self._began_ms = left_in, right_in, began_ms
        self.inch_per_ms = (right_in - left_in) / (ended_ms - began_ms)

    def x(self, ms: float) -> float:
        return self.left_in + self.inch_per_ms * (ms - self._began_ms)

    def span(
        self, drawing: Drawing, y: float, times_ms: tuple[float, float], words: str, height: float = 0.5, **style
    ) -> None:
        began_ms, ended_ms = times_ms
        drawing.span(self.x(began_ms), y, self.inch_per_ms * (ended_ms - began_ms), height, words, **style)

    def shards(self, drawing: Drawing, y: float, times_ms: tuple[float, float], ranks: Iterable[int]) -> None:
        began_ms, ended_ms = times_ms
        drawing.shards(self.x(began_ms), y, self.inch_per_ms * (ended_ms - began_ms), ranks)

    def axis(self, drawing: Drawing, y: float, ticks_ms: list[float]) -> None:
        drawing.arrow((self.left_in, y), (self.right_in + 0.15, y))
        for ms in ticks_ms:
            drawing.line((self.x(ms), y - 0.04), (self.x(ms), y + 0.04))
            drawing.text(self.x(ms), y + 0.18, f"{ms:.0f}", "note")
        drawing.text(self.left_in - 0.15, y, "time, ms (example)", "note", ha="right")
