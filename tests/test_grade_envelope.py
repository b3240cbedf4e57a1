"""Code that is right only for the usual sizes passes a student's own checks, but not those in grading."""

import textwrap

import pytest

from shared import ranks
from shared.checks.__main__ import run_file
from shared.checks.engine.display import as_text
from shared.checks.engine.framework import WORLD_SIZES

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.chapter("manual_ddp")]

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
STOPS_SHUFFLING = """
    class ShardedSampler(ShardedSampler):
        def __init__(self, length, rank, world_size, shuffle=True, seed=0):
            super().__init__(length, rank, world_size, shuffle and length <= 60, seed)
"""
ATTACKS = {
    "stops after step 3": (STOPS_AFTER_STEP_3, "ManualDDP"),
    "skips large tensors": (SKIPS_LARGE_TENSORS, "average_gradients"),
    "stops shuffling above length 60": (STOPS_SHUFFLING, "ShardedSampler"),
}


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    ranks.start(max(WORLD_SIZES), detect_mismatch=False)
    yield
    ranks.stop()


@pytest.mark.parametrize("name", ATTACKS)
def test_grading_draws_more_than_the_usual_sizes(tmp_path, name):
    from solutions import manual_ddp

    source, piece = ATTACKS[name]
    with open(manual_ddp.__file__) as file:
        (tmp_path / "attack.py").write_text(file.read() + textwrap.dedent(source))
    assert all(verdict.passed for verdict in run_file("manual_ddp", tmp_path / "attack.py", only=piece))
    verdicts = run_file("manual_ddp", tmp_path / "attack.py", only=piece, graded=True)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    assert failed and all("Drawn with seed" in verdict.evidence for verdict in failed)


def test_what_was_drawn_can_be_drawn_again(tmp_path):
    from solutions import manual_ddp

    with open(manual_ddp.__file__) as file:
        (tmp_path / "attack.py").write_text(file.read() + textwrap.dedent(STOPS_AFTER_STEP_3))
    one, other = (
        run_file("manual_ddp", tmp_path / "attack.py", 5, "ManualDDP", "plain model", graded=True) for _ in range(2)
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
        verdicts = run_file("manual_ddp", tmp_path / "broken.py", only="ManualDDP", graded=True)
        text = as_text(verdicts)
        assert [verdict.passed for verdict in verdicts] == [False] * 9
        assert text.count(evidence) == times, text  # once each on one rank, on two ranks, and in a group
