"""Code that is right only for the usual sizes passes a student's own checks, but not those in grading."""

import textwrap

import pytest

from instructor.build import ROOT
from instructor.grade.drawing import GradingRunner
from shared import ranks
from shared.checks.__main__ import run_file
from shared.checks.engine.display import as_text
from shared.checks.engine.framework import WORLD_SIZES

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

STOPS_AFTER_STEP_3 = """
    class ManualDDP(ManualDDP):
        steps = 0

        def finish_gradient_sync(self):
            self.steps += 1
            if self.steps <= 3:
                super().finish_gradient_sync()
"""
SKIPS_LARGE_TENSORS = """
    def average_gradients(module, group=None):
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.numel() <= 200:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                mean_over_ranks_(parameter.grad, group)
"""
STOPS_AFTER_CALL_3 = """
    calls = 0

    def average_gradients(module, group=None):
        global calls
        calls += 1
        for parameter in module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if calls <= 3:
                    mean_over_ranks_(parameter.grad, group)
"""
ATTACKS = {  # the module, the piece, and the code
    "stops after step 3": ("manual_ddp", "ManualDDP", STOPS_AFTER_STEP_3),
    "stops after call 3": ("manual_ddp", "average_gradients", STOPS_AFTER_CALL_3),
    "skips large tensors": ("manual_ddp", "average_gradients", SKIPS_LARGE_TENSORS),
}
EARNS_NOTHING = [name for name in ATTACKS if "stop" in name]


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    ranks.start(max(WORLD_SIZES), detect_mismatch=False)
    yield
    ranks.stop()


@pytest.mark.parametrize("name", ATTACKS)
def test_grading_draws_more_than_the_usual_sizes(tmp_path, name):
    module, piece, source = ATTACKS[name]
    path = tmp_path / "attack.py"
    path.write_text((ROOT / "solutions" / f"{module}.py").read_text() + textwrap.dedent(source))
    assert all(verdict.passed for verdict in run_file(module, path, only=piece))
    verdicts = run_file(module, path, only=piece, runner=GradingRunner())
    failed = [verdict for verdict in verdicts if not verdict.passed]
    assert any("Drawn with seed" in verdict.evidence for verdict in failed)
    if name in EARNS_NOTHING:
        assert len(failed) == len(verdicts), "\n".join(each.check for each in verdicts if each.passed)


def test_what_was_drawn_can_be_drawn_again(tmp_path):
    from solutions import manual_ddp

    with open(manual_ddp.__file__) as file:
        (tmp_path / "attack.py").write_text(file.read() + textwrap.dedent(STOPS_AFTER_STEP_3))
    one, other = (
        run_file("manual_ddp", tmp_path / "attack.py", 5, "ManualDDP", "plain model", runner=GradingRunner())
        for _ in range(2)
    )
    assert one == other and not one[0].passed


def test_one_mistake_that_fails_many_checks_is_told_once(tmp_path):
    """Each check draws other sizes. With these, the same error once filled a page nine times."""
    from solutions import manual_ddp

    wrong_ones = (
        ("raise ValueError('oops')", "ValueError: oops", 3),
        ("raise NotImplementedError", "not written yet", 1),
    )
    for body, evidence, times in wrong_ones:
        with open(manual_ddp.__file__) as file:
            broken = f"\nclass ManualDDP(nn.Module):\n    def __init__(self, module, group=None):\n        {body}\n"
            (tmp_path / "broken.py").write_text(file.read() + broken)
        verdicts = run_file("manual_ddp", tmp_path / "broken.py", only="ManualDDP", runner=GradingRunner())
        text = as_text(verdicts)
        assert [verdict.passed for verdict in verdicts] == [False] * 9
        assert text.count(evidence) == times, text  # once each on one rank, on two ranks, and in a group
