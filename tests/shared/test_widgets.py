"""The figures of chapter 01 and their stepper: what they show, and what remains in a notebook file."""

import nbformat
import pytest
from matplotlib.patches import Rectangle

from instructor import build
from shared import formulas, widgets
from shared.plots import costs as cost_plots
from shared.plots import ring as ring_plots

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def ring_logs(size: int) -> list:
    """Compute in one process what the ranks of a correct ring all-reduce would log."""
    names = "ABCD"[:size]
    held = [{name: "0" * rank + "1" + "0" * (size - 1 - rank) for name in names} for rank in range(size)]
    logs = [[{"sent": None, "holds": dict(holds)}] for holds in held]
    for step in range(2 * (size - 1)):
        add = step < size - 1
        sends = [names[(rank - step - 1 if add else rank - (step - size + 1)) % size] for rank in range(size)]
        before = [dict(holds) for holds in held]
        for rank, holds in enumerate(held):
            received = sends[rank - 1]
            digits = zip(before[rank - 1][received], before[rank][received] if add else "0" * size, strict=True)
            holds[received] = "".join(str(int(theirs) + int(own)) for theirs, own in digits)
            logs[rank].append({"sent": sends[rank], "holds": dict(holds)})
    return logs


def cells(axes) -> list[list[str]]:
    """Return the texts of a panel, one list per chunk, starting with rank 0."""
    placed = sorted((text.get_position()[1], text.get_position()[0], text.get_text()) for text in axes.texts)
    rows = sorted({y for y, _, text in placed if text})
    return [[text for row, _, text in placed if row == y and text] for y in rows]


def thick_frames(axes) -> int:
    return sum(isinstance(patch, Rectangle) and patch.get_linewidth() > 2 for patch in axes.patches)


def luminance(color) -> float:
    red, green, blue = color
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# -- the ring


def test_a_step_names_the_ranks_in_each_sum_and_frames_received_chunks():
    axes = ring_plots.ring_step(ring_logs(4), 2).axes[0]
    assert cells(axes) == [
        ["0", "1", "12", "123"],
        ["023", "1", "2", "23"],
        ["03", "013", "2", "3"],
        ["0", "01", "012", "3"],
    ]
    assert axes.get_title() == "step 2: add the received chunk"
    assert thick_frames(axes) == 4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_the_start_has_no_arrows_and_the_second_half_copies():
    start, fourth = (ring_plots.ring_step(ring_logs(4), step).axes[0] for step in (0, 4))
    assert thick_frames(start) == 0 and start.get_title() == "start"
    assert all(row == ["0", "1", "2", "3"] for row in cells(start))
    assert fourth.get_title() == "step 4: copy the received chunk"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_figure_of_all_steps_ends_in_complete_sums(size):
    panels = [axes for axes in ring_plots.ring_steps(ring_logs(size)).axes if axes.get_title()]
    assert len(panels) == 1 + 2 * (size - 1)
    assert cells(panels[-1]) == [["0123"[:size]] * size] * size


def test_a_contribution_that_was_added_twice_is_visible():
    logs = ring_logs(3)
    logs[1][1]["holds"]["C"] = "210"
    assert "001" in cells(ring_plots.ring_step(logs, 1).axes[0])[2]


@pytest.mark.parametrize("logs", [[], [[], []], [ring_logs(3)[0], ring_logs(3)[1][:-1]]])
def test_logs_of_different_lengths_are_rejected(logs):
    for draw in (ring_plots.ring_steps, lambda logs: ring_plots.ring_step(logs, 0)):
        with pytest.raises(ValueError, match="of the same length"):
            draw(logs)


def test_sums_of_more_contributions_are_darker_without_color():
    shades = [luminance(ring_plots._shade(contributions / 4)) for contributions in range(1, 5)]
    assert shades == sorted(shades, reverse=True)
    assert shades[-2] - shades[-1] > 0.15, "a complete sum stands out"
    assert shades[-1] < 0.45, "white text on it is readable"


# -- the α–β model


def test_predictions_are_lines_and_measurements_marks_of_the_same_color():
    axes = cost_plots.predicted_against_measured(
        {"ring": lambda size: 1e-3 + 1e-9 * size}, {"ring": {100: 2e-3, 10**7: 3e-3}, "torch": {100: 1e-3}}, "bytes"
    ).axes[0]
    line, marks, other = axes.lines
    assert [line.get_xdata()[0], round(line.get_xdata()[-1])] == [100, 10**7]
    assert line.get_ydata()[-1] == pytest.approx(11)  # ms
    assert list(marks.get_ydata()) == [2, 3] and marks.get_linestyle() == "None"
    assert line.get_color() == marks.get_color() != other.get_color()
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_places_are_panels_on_common_axes():
    ring_s, star_s = {100: 1e-3, 10**6: 9e-3}, {100: 1e-3, 10**6: 8e-3}
    figure = cost_plots.side_by_side({"loopback": {"ring": ring_s}, "link": {"ring": ring_s, "star": star_s}}, "bytes")
    loopback, link = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["loopback", "link"]
    assert list(link.lines[1].get_ydata()) == [1, 8]  # ms
    assert loopback.lines[0].get_color() == link.lines[0].get_color()
    assert loopback.get_ylim() == link.get_ylim() and loopback.get_xscale() == "log"


def test_the_size_at_which_the_ring_overtakes_the_tree_is_marked():
    """For 4 ranks: 6α + 1.5Sβ = 4α + 4Sβ, so S = α / 1.25β; for 1024: 2026α = (20 − 2·1023/1024)·Sβ."""
    alpha_s, beta_s = 1e-4, 1e-9
    algorithms = {
        "ring": lambda size, ranks: formulas.ring_all_reduce_s(size, ranks, alpha_s, beta_s),
        "tree": lambda size, ranks: formulas.tree_all_reduce_s(size, ranks, alpha_s, beta_s),
    }
    panels = cost_plots.all_reduce_costs(algorithms, [4, 1024]).axes
    marked = [axes.lines[-1].get_xdata()[0] for axes in panels]
    assert marked == pytest.approx([8e4, 2026 / (20 - 2 * 1023 / 1024) * 1e5], rel=1e-3)
    assert [axes.texts[0].get_text() for axes in panels] == [" 80 KB", " 11 MB"]
    assert [axes.get_title() for axes in panels] == ["4 ranks", "1024 ranks"]


def test_curves_that_never_cross_have_no_crossing():
    sizes = [1.0, 2.0, 3.0]
    assert cost_plots.first_below(sizes, [5, 3, 1], [4, 4, 4]) == pytest.approx(2**0.5)  # halfway on a logarithmic axis
    assert cost_plots.first_below(sizes, [5, 5, 5], [4, 4, 4]) is None
    assert cost_plots.first_below(sizes, [1, 1, 1], [4, 4, 4]) is None


# -- the stepper


def test_without_jupyterlab_only_the_static_figure_is_shown(displayed):
    figure = widgets.ring_stepper(ring_logs(3))
    assert displayed == []
    assert widgets.as_png(figure) == widgets.as_png(ring_plots.ring_steps(ring_logs(3)))


def test_the_slider_shows_what_the_pure_function_draws(displayed, with_a_reader):
    logs = ring_logs(3)
    assert widgets.as_png(widgets.ring_stepper(logs)) == widgets.as_png(ring_plots.ring_steps(logs))
    [box] = displayed
    (play, slider), picture = box.children[0].children, box.children[1]
    assert (slider.min, slider.max, play.min, play.max) == (0, 4, 0, 4)
    for step in (3, 4, 0):
        slider.value = step
        assert picture.value == widgets.as_png(ring_plots.ring_step(logs, step))


@pytest.mark.parametrize(
    "path", sorted(build.ROOT.glob("[cls]*/*.ipynb")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_no_built_notebook_keeps_a_widget_without_its_state(path):
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    assert not any(WIDGET_VIEW in output.get("data", {}) for output in outputs)
