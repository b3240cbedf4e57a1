"""The messages of chapter 07's checks name the mistake, and point at a more basic check that fails, too."""

import re

import pytest

from shared import ranks
from shared.checks.__main__ import run_file
from tests import mutants

pytestmark = [pytest.mark.slow, pytest.mark.chapter("zero1")]

OWNERS = "is this element in the rank's own shard"


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


def verdict_on(tmp_path, piece: str, check: str, text: str):
    path = tmp_path / "candidate.py"
    path.write_text(text)
    (verdict,) = run_file("zero1", path, only=piece, check=check)
    assert not verdict.passed
    return verdict


@pytest.mark.parametrize(
    ("mutant", "piece", "check", "hint"),
    [
        ("flat_copies_parameters", "FlatParameter", "all-gather", "whose memory does each parameter use"),
        ("flat_copies_parameters", "FlatParameter", "memory", "whose memory does each parameter use"),
        ("flat_shard_is_a_copy", "FlatParameter", "memory", "whose memory does `shard` use"),
        ("sharded_gathers_nothing", "ShardedOptimizer", "plain", OWNERS),
        # Where the norm of a flat tensor is below max_norm, this mutant does not scale it at all.
        ("clips_each_flat_tensor", "ZeRO1", "clipping", "by which factor|which tensors are scaled"),
        ("clips_without_epsilon", "ZeRO1", "skipped step", "by which factor"),
    ],
)
def test_a_mistake_gets_its_own_hint(tmp_path, mutant, piece, check, hint):
    assert re.search(hint, verdict_on(tmp_path, piece, check, mutants.named("07_zero1", mutant).code()).hint)


COPY = """
from torch import nn

from solutions import flat as right


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        self.layout = right.FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        COPY
        self.shard = nn.Parameter(self.layout.shard_of(self.flat_param))
        self._alias_parameters()
"""


@pytest.mark.parametrize(
    ("copy", "check"),
    [
        ("[view.copy_(p) for view, p in zip(self.layout.views(self.flat_param), parameters)]", "layout"),
        ("self.flat_param[: self.layout.numel] = right.torch.cat([p.flatten() for p in parameters])", "views"),
    ],
)
def test_a_copy_that_autograd_records_is_hinted_at(tmp_path, copy, check):
    assert "should autograd record" in verdict_on(tmp_path, "FlatParameter", check, COPY.replace("COPY", copy)).hint


def test_a_changed_param_group_is_named_before_the_wrong_values(tmp_path):
    text = """
from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["params"] = self.inner.param_groups[-1]["params"]
"""
    verdict = verdict_on(tmp_path, "ShardedOptimizer", "plain", text)
    assert "in param_groups were replaced" in verdict.evidence and "uses the same dict" in verdict.hint


def test_settings_that_are_never_copied_are_looked_for_in_settings(tmp_path):
    text = """
from solutions import zero1 as right


class ShardedOptimizer(right.ShardedOptimizer):
    def update_parameters(self):
        self.inner.step()
        for work in [flat_parameter.launch_all_gather() for flat_parameter in self.flat_parameters]:
            work.wait()
        self.zero_grad()
"""
    assert "“settings” fails, too" in verdict_on(tmp_path, "ShardedOptimizer", "more parameters", text).hint


def test_a_missing_all_gather_gets_the_same_hint_in_the_next_exercise(tmp_path):
    text = """
from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def update_parameters(self):
        self.inner.step()
"""
    assert OWNERS in verdict_on(tmp_path, "ZeRO1", "values", text).hint
