"""The figures of sharding draw their data, and can be read without color."""

import pytest

from shared.plots import zero as zero_plots


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
