"""The figures that several chapters share: what they show, and what they leave out because nobody could see it."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from shared import memory, plots
from shared.plots import attention, costs
from shared.plots import buckets as bucket_plots
from shared.plots import zero as zero_plots
from shared.timeline import Span, Timeline


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_exposed_time_of_a_timeline_can_be_left_out():
    lines = [Timeline(0, [Span("communication", "send 1", 0.0, 0.4)], began_s=0.0, ended_s=1.0)]
    assert "400 ms exposed\n0% hidden" in texts(plots.timeline(lines))
    assert not any("exposed" in text for text in texts(plots.timeline(lines, exposed=False)))


def test_all_names_in_a_lane_are_short_if_one_of_them_has_no_more_room():
    spans = [Span("communication", "send to 1", 0.0, 0.5), Span("communication", "recv from 2", 0.6, 0.63)]
    drawn = texts(plots.timeline([Timeline(0, spans, began_s=0.0, ended_s=1.0)]))
    assert drawn[:2] == ["→1", "←2"]
    drawn = texts(plots.timeline([Timeline(0, spans[:1], began_s=0.0, ended_s=1.0)]))
    assert drawn[0] == "send to 1"


def test_a_span_that_is_too_short_to_see_is_drawn_as_a_hairline():
    spans = [Span("optimizer", "optimizer", 0.5, 0.500001)]
    (axes,) = plots.timeline([Timeline(0, spans, began_s=0.0, ended_s=1.0)], exposed=False).axes
    (bar,) = axes.collections[0].get_paths()
    assert bar.get_extents().width > 2


def test_a_hairline_after_another_span_does_not_seem_to_end_later():
    spans = [Span("backward", "block", 0.0, 0.5), Span("backward", "embedding", 0.5, 0.501)]
    (axes,) = plots.timeline([Timeline(0, spans, began_s=0.0, ended_s=1.0)], exposed=False).axes
    _, bar = axes.collections[0].get_paths()
    assert bar.get_extents().x1 == pytest.approx(501)
    assert bar.get_extents().width > 2


def test_timelines_with_names_begin_at_zero_on_one_scale():
    spans = [Span("communication", "send 1", 0.0, 0.4)], [Span("communication", "send 1", 5.0, 5.2)]
    lines = [Timeline(0, its, began_s=its[0].began_s, ended_s=its[0].ended_s) for its in spans]
    (axes,) = plots.timeline(lines, ["before", "after"]).axes
    assert axes.get_xlim() == (0, 400)
    assert [bars.get_paths()[0].get_extents().x0 for bars in axes.collections] == [0, 0]
    (axes,) = plots.timeline(lines).axes
    assert axes.get_xlim()[1] == pytest.approx(5200)


def test_a_component_too_small_to_see_is_not_in_the_legend():
    held = {"rank 0": {"parameters": 10_000_000, "gradients": 0, "other": 400}}
    names = [text.get_text() for text in plots.memory_by_component(held).axes[0].get_legend().get_texts()]
    assert names == ["parameters"]


@pytest.mark.parametrize(("count", "shades"), [(20, 20), (21, 2)])
def test_buckets_are_shades_of_one_hue_and_many_are_two_grays(count, shades):
    sizes_bytes = {f"blocks.{number}.weight": 100 for number in range(count)}
    figure, axes = plots.new_axes(7.0, 5.0)
    bucket_plots.draw_map(axes, sizes_bytes, [[name] for name in sizes_bytes])
    plots.finish(figure)
    assert not any(bars.get_hatch() for bars in axes.collections)
    colors = [tuple(bars.get_facecolor()[0]) for bars in axes.collections]
    assert len(set(colors)) == shades
    assert all(color != next_color for color, next_color in pairwise(colors))


def test_the_best_interval_between_saves_is_marked():
    drawn = texts(costs.saving_intervals((60, 2), failure_s=7200.0))
    assert drawn == ["15.5 minutes: 12.9%", "2.8 minutes: 2.4%"]  # Young 1974: the square root of 2 · save · failure


def test_another_steps_peak_sets_the_height_of_the_axis():
    step = [SimpleNamespace(phase="forward", held=memory.Held(parameters_bytes=2_000_000))] * 3
    (axes,) = plots.memory_over_step(step, compared_with=("plain", 10_000_000)).axes
    assert "plain: 10 MB" in [text.get_text() for text in axes.texts] and axes.get_ylim()[1] > 10


# -- sharding


def test_ownership_draws_every_piece_with_its_rank():
    sizes = {"embedding.weight": 60, "blocks.0.up": 1, "blocks.0.down": 38, "norm.weight": 2}
    owned = [["embedding.weight"], ["blocks.0.down", "blocks.0.up", "norm.weight"]]
    axes = zero_plots.ownership(sizes, owned).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [60, 39, 2, 60, 1, 38, 2, 51, 51]
    assert [text.get_text() for text in axes.texts] == ["embedding", "blocks.0", "0", "1", "0", "1"]
    rows = ["the model", "one owner per parameter", "one owner per element"]
    assert [label.get_text() for label in axes.get_yticklabels()] == rows


def test_two_ranks_also_differ_in_their_hatches():
    bars = zero_plots.ownership({"a": 1, "b": 1}, [["a"], ["b"]]).axes[0].patches[2:]
    assert bars[0].get_hatch() != bars[1].get_hatch()


def test_bytes_per_parameter_has_lines_marks_and_limits():
    formula = {"fp32": {1: 16.0, 2: 12.0}, "mixed": {1: 16.0, 2: 10.0}}
    axes = zero_plots.bytes_per_parameter(formula, {"fp32": {2: 12.1}}, {"fp32": 8.0}).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["fp32, formula"] == [16.0, 12.0] and drawn["fp32, measured"] == [12.1]
    assert drawn["mixed, formula"] == [16.0, 10.0] and "mixed, measured" not in drawn
    assert [text.get_text() for text in axes.texts] == ["N → ∞: 8"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]


def test_over_backward_scales_lines_of_any_length_to_the_same_width():
    figure = zero_plots.over_backward({"all": [0, 8_000_000], "freed": [0, 2_000_000, 1_000_000]}, {"Ψ": 4e6})
    drawn = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(drawn["all"].get_xdata()) == [0, 100] and list(drawn["all"].get_ydata()) == [0, 8]
    assert list(drawn["freed"].get_xdata()) == [0, 50, 100] and list(drawn["freed"].get_ydata()) == [0, 2, 1]
    assert drawn["all"].get_linestyle() != drawn["freed"].get_linestyle()
    assert [text.get_text() for text in figure.axes[0].texts] == ["Ψ"]


@pytest.mark.parametrize("held_bytes", [{}, {"none": []}])
def test_over_backward_rejects_a_line_without_moments(held_bytes):
    with pytest.raises(ValueError, match="nothing to draw"):
        zero_plots.over_backward(held_bytes, {})


def test_a_transfer_that_is_never_hidden_has_a_line_but_no_mark():
    times = attention.StepTimes([64.0, 128.0], [0.001, 0.002], {"slow": [1.0, 2.0]})
    (axes,) = attention.step_times(times, {}).axes
    assert [line.get_label() for line in axes.lines] == ["attention: grows with n²", "slow"] and not axes.texts
