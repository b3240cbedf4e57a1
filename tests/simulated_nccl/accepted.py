"""Right code, which must break no rule of NCCL: the solutions, the variants, and the registry of strategies."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

from instructor.build import chapters, module_names
from shared.checks.__main__ import available, exercises_of, run_file
from shared.checks.engine.attempts import Check
from shared.checks.engine.verdicts import Verdict
from solutions.strategies import STRATEGIES
from solutions.train import Settings, train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5  # the fewest that the training script can measure


def checked_files() -> list[tuple[str, Path]]:
    """Return every solution that has checks and every variant that is right on NCCL, each with its check module."""
    checked = set(available())
    files = []
    for chapter in chapters():
        modules = [module for module in module_names(chapter) if module in checked]
        files += [(module, ROOT / "solutions" / f"{module}.py") for module in modules]
        variants = sorted((ROOT / "tests" / "variants" / chapter.name).glob("*.py"))
        files += [(module_names(chapter)[0], path) for path in variants if not needs_gloo(path)]
    return files


def needs_gloo(path: Path) -> bool:
    """Return whether a variant says that it would hang on NCCL."""
    return re.search(r"^needs gloo: ", path.read_text(), re.MULTILINE) is not None


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def failures_of(module: str, path: Path) -> list[str]:
    """Run all checks of a file on the ranks that are running. Returns a line for each check that fails."""
    return [_said(verdict) for verdict in run_file(module, path) if not verdict.passed]


def _said(verdict: Verdict) -> str:
    return f"{verdict.exercise} · {verdict.check}: {verdict.evidence}"


@contextlib.contextmanager
def only_first_checks(module: str) -> Iterator[None]:
    """Run only the first check of each exercise that communicates, at the smallest world size at which it does.

    It trains a plain model, or calls the piece in the plainest way.
    """
    with contextlib.ExitStack() as changes:
        for exercise in exercises_of(module):
            communicating = [check for check in exercise.checks if max(check.world_sizes) > 1]
            chosen = [_at_smallest_size(check) for check in communicating[:1]]
            changes.enter_context(mock.patch.object(exercise, "checks", chosen))
        yield


def _at_smallest_size(check: Check) -> Check:
    return replace(check, world_sizes=(min(size for size in check.world_sizes if size > 1),))


def strategies() -> list[str]:
    """Return the strategies that can be built here."""
    return [name for name, strategy in STRATEGIES.items() if strategy.why_not() is None]


def losses_of(strategy: str, model: str) -> list[float]:
    """Train with a strategy as the training script does, and return the losses. Runs on the ranks."""
    return train(Settings(strategy=strategy, model=model, steps=STEPS, global_batch=24)).losses


def model_for(strategy: str) -> str:
    """Return which model a strategy trains: tensor parallelism splits only a GPT, expert parallelism only experts."""
    if STRATEGIES[strategy].shards_experts:
        return "moe"
    return "gpt" if STRATEGIES[strategy].splits_layers else "mlp"
