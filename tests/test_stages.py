"""The README's figure of the stages: measurements agree with the formulas, and both are drawn."""

import pytest

from benchmarks import stages
from benchmarks.stages import STAGES, STATE, StageResult, predicted
from shared import ranks

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_the_stages_hold_and_send_what_the_formulas_say(four_ranks):
    for stage, measured in enumerate(ranks.run(stages.on_a_rank, 2, 0)[0]):
        formula = predicted(stage)
        assert measured.held_mb == pytest.approx(formula.held_mb, rel=0.001, abs=0.001)  # shards are padded
        assert measured.sent_mb == pytest.approx(formula.sent_mb, rel=0.001)
        assert len(measured.ratios) == 2


def test_each_stage_is_drawn_beside_its_formula():
    held_mb = dict.fromkeys((*STATE, "gathered"), 2.0)
    measured = [StageResult(held_mb, 3.0 + stage, [1.0, 1.0 + stage, 9.0]) for stage in range(4)]
    memory, wire, time = stages.figure(measured, [predicted(stage) for stage in range(4)]).axes
    assert [label.get_text() for label in memory.get_yticklabels()] == STAGES
    assert [bar.get_width() for bar in memory.patches[:4]] == [2.0] * 4
    assert [bar.get_width() for bar in wire.patches[::2]] == [3.0, 4.0, 5.0, 6.0]
    assert [bar.get_width() for bar in time.patches] == [1.0, 2.0, 3.0, 4.0]
    lines = stages.as_table(measured, measured).splitlines()
    assert len(lines) == 5 and lines[2].split()[-7:] == ["6.0", "6.0", "2.0", "2.0", "4.0", "4.0", "2.00"]
