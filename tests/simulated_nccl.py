"""Run every check on every solution and variant under simulated NCCL: python -m tests.simulated_nccl [NAME …].

Even `make test ALL=1` runs only a part of this, because it takes about 20 minutes. A NAME is a part of `folder-file`,
such as `04_overlap` or `solutions-zero3`. The exit status is 0 if no check fails.

The rest is right code, which must break no rule of NCCL: the solutions, the variants, and the registry of strategies.
"""

import contextlib
import io
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

from instructor.build import chapters, module_names
from shared import ranks
from shared.checks.__main__ import available, exercises_of, run_file
from shared.checks.engine.attempts import Check
from solutions.strategies import STRATEGIES
from solutions.train import Settings, train

ROOT = Path(__file__).resolve().parent.parent
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


def needs_gloo(path: Path) -> str:
    """Return the piece with which a variant would hang on NCCL, as it says itself, or ""."""
    needs = re.search(r"^needs gloo: (\w+)$", path.read_text(), re.MULTILINE)
    return needs[1] if needs else ""


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def failures_of(module: str, path: Path) -> list[str]:
    """Run all checks of a file on the ranks that are running. Returns a line for each check that fails."""
    failed = [verdict for verdict in run_file(module, path) if not verdict.passed]
    return [f"{verdict.exercise} · {verdict.check}: {verdict.evidence}" for verdict in failed]


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


def main(names: list[str]) -> int:
    """Check the files whose name contains one of these names, or all files."""
    failed = []
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(4, backend="gloo:cpu", simulate="nccl", detect_mismatch=False)
    try:
        for module, path in checked_files():
            if names and not any(name in name_of(path) for name in names):
                continue
            began_s = time.monotonic()
            failures = failures_of(module, path)
            print(f"{name_of(path)}: {len(failures)} failed, {time.monotonic() - began_s:.0f} s", flush=True)
            print("".join(f"  {failure}\n" for failure in failures), end="", flush=True)
            failed += failures
    finally:
        ranks.stop()
    print(f"{len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
