"""The messages of chapter 09's checks point at the mistake that was made."""

from pathlib import Path

import pytest

from shared import ranks
from shared.checks.__main__ import run_file
from tests import mutants

pytestmark = [pytest.mark.slow, pytest.mark.chapter("zero3")]

CHAPTER = "09_zero3"


@pytest.fixture(scope="module", autouse=True)
def three_ranks():
    ranks.start(world_size=3, detect_mismatch=False)
    yield
    ranks.stop()


def verdict_on(path: Path, piece: str, check: str):
    (verdict,) = run_file("units", path, only=piece, check=check)
    assert not verdict.passed
    return verdict


PREFETCHER = """
from solutions import prefetching as right


class Prefetcher(right.Prefetcher):
"""
IN_FORWARD = """
    def in_forward(self, unit):
        self.called.append(unit)
        self._unshard(self.expected[self.expected.index(unit) + 1 :])
"""
IN_BACKWARD = """
    def in_backward(self, unit, unreached=()):
        order = self.called[::-1]
        self._unshard([each for each in order[order.index(unit) + 1 :] if each not in unreached])
"""


@pytest.mark.parametrize(
    ("method", "check", "hint"),
    [
        (IN_FORWARD, "plain order", "In the first forward, `expected` is empty. Hint: when is the unit in it?"),
        (IN_FORWARD, "backward", "In the first forward, `expected` is empty. Hint: when is the unit in it?"),
        (IN_BACKWARD, "backward", "Hint: what should in_backward() do for a unit that is not in `called`?"),
    ],
    ids=["forward", "forward before backward", "backward"],
)
def test_a_unit_that_is_not_in_a_list_is_hinted_at_by_method(tmp_path, method, check, hint):
    path = tmp_path / "candidate.py"
    path.write_text(PREFETCHER + method)
    assert verdict_on(path, "Prefetcher", check).hint == hint


def test_a_forgotten_group_is_hinted_at(tmp_path):
    path = mutants.named(CHAPTER, "shards_forget_the_group").write(tmp_path)
    verdict = verdict_on(path, "ShardedFlatParameter", "unshard")
    assert "invalid for input of size" in verdict.evidence and "which group does the all-gather use?" in verdict.hint


def test_handles_that_are_kept_are_counted(tmp_path):
    path = mutants.named(CHAPTER, "unit_keeps_its_handles").write(tmp_path)
    verdict = verdict_on(path, "Unit", "a plain forward")
    assert "wait_for_unshard(): all all-gathers are complete, but self.works holds" in verdict.evidence


def test_a_hook_without_the_gradient_is_named(tmp_path):
    path = mutants.named(CHAPTER, "plain_drops_the_gradient").write(tmp_path)
    verdict = verdict_on(path, "PlainZeRO3", "backward hooks")
    assert "calls pre_backward() without the gradient" in verdict.evidence
