"""The figures of sharding draw their data, and can be read without color."""

import pytest

from shared.plots import zero as zero_plots


def test_ownership_draws_every_piece_with_its_rank():
    model = {"embedding": 60, "tiny": 1, "rest": 39}
    ways = {"by range": [(50, 0), (50, 1)], "by parameter": [(60, 0), (1, 1), (39, 1)]}
    axes = zero_plots.ownership(model, ways).axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [60, 1, 39, 50, 50, 60, 1, 39]
    assert [text.get_text() for text in axes.texts] == ["embedding", "rest", "0", "1", "0", "1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["the model", "by range", "by parameter"]


def test_two_ranks_also_differ_in_their_hatches():
    bars = zero_plots.ownership({"all": 2}, {"by range": [(1, 0), (1, 1)]}).axes[0].patches[1:]
    assert bars[0].get_hatch() != bars[1].get_hatch()


def test_ownership_without_a_way_of_sharding_is_rejected():
    with pytest.raises(ValueError, match="at least"):
        zero_plots.ownership({"all": 1}, {})


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
