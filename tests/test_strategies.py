"""The registry of strategies: its metadata is correct, and a strategy that cannot be built says so in one sentence."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from instructor import build
from solutions.strategies import STRATEGIES, Options

ROOT = Path(__file__).parent.parent
OF_LABS = [strategy for strategy in STRATEGIES.values() if strategy.needs]


@pytest.mark.parametrize("strategy", OF_LABS, ids=lambda strategy: strategy.name)
def test_the_chapter_that_a_strategy_names_exports_what_it_needs(strategy):
    (chapter,) = [chapter for chapter in build.chapters() if int(chapter.name[:2]) == strategy.chapter]
    assert strategy.needs in [f"solutions.{module}" for module in build.module_names(chapter)]


def test_keys_are_names_and_counterparts_come_from_another_provider_at_the_same_stage():
    assert [strategy.name for strategy in STRATEGIES.values()] == list(STRATEGIES)
    for strategy in STRATEGIES.values():
        if strategy.counterpart:
            counterpart = STRATEGIES[strategy.counterpart]
            assert strategy.provider == "course" != counterpart.provider and strategy.stage == counterpart.stage


def test_the_registry_can_be_imported_before_any_lab_is_solved():
    listed = "import sys, solutions.strategies; print([name for name in sys.modules if name.startswith('solutions.')])"
    done = subprocess.run([sys.executable, "-c", listed], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "['solutions.strategies']", done.stderr


@pytest.mark.parametrize("strategy", OF_LABS, ids=lambda strategy: strategy.name)
def test_a_strategy_whose_lab_is_not_solved_says_so(monkeypatch, strategy):
    assert strategy.why_not() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f"the finished module of lab {strategy.chapter:02d}" in strategy.why_not()
    with pytest.raises(RuntimeError, match=re.escape(f"strategy {strategy.name} needs {strategy.needs}")):
        strategy.build(nn.Linear(1, 1))


def test_an_option_that_a_strategy_does_not_support_is_rejected():
    with pytest.raises(ValueError, match="strategy zero2 does not support the option compute_dtype"):
        STRATEGIES["zero2"].build(nn.Linear(1, 1), Options(compute_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="strategy ddp does not support the option param_groups"):
        STRATEGIES["ddp"].build(nn.Linear(1, 1), replace(Options(), param_groups=lambda module: []))
