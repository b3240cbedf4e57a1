"""What stands in a folder of checkpoints: whole ones, halves of those that were killed, and what is none of it."""

import os
import random
import tempfile
from pathlib import Path

from shared.checks.checkpoints.saved import Saving, settle, train
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw

JUNK = "__99_0.distcp"  # as ranks leave it that no longer are


def put(folder: Path, name: str, whole: bool = True) -> Path:
    """Lay out what looks like a checkpoint; ranks that are killed leave no .metadata."""
    path = folder / name
    path.mkdir(parents=True)
    (path / JUNK).write_bytes(bytes(64))
    if whole:
        (path / ".metadata").write_bytes(bytes(64))
    return path


def names_in(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def probe_newest(newest_checkpoint, folders: list[str]) -> list[str | None]:
    found = [newest_checkpoint(Path(folder)) for folder in folders]
    for path in found:
        if not isinstance(path, Path | None):
            raise AssertionError(f"newest_checkpoint() returns a {type(path).__name__}, expected a Path or None")
    return [path if path is None else str(path) for path in found]


def the_largest_step_is_found(attempt: Attempt) -> None:
    with tempfile.TemporaryDirectory() as root:
        cases = _lay_out(Path(root), attempt.random)
        found = attempt.run(probe_newest, [str(folder) for folder, _, _ in cases])[0]
        for (folder, want, hint), path in zip(cases, found, strict=True):
            inside = ", ".join(names_in(folder)) if folder.exists() else "nothing: it is not there"
            said = f"newest_checkpoint() of a folder with {inside or 'nothing'}: {path and Path(path).name}"
            if path != (want and str(folder / want)):
                raise Wrong(f"{said}; expected {want}", f"Look at: {hint}")


def _lay_out(root: Path, draw: random.Random) -> list[tuple[Path, str | None, str]]:
    """→ folders, the name to be found in each, and what to look at"""
    low = 10 ** draw.randrange(1, 5) - draw.randrange(1, 3)
    high = low + draw.randrange(2, 9)  # one digit more
    order = [put(root / "several", f"step_{step}") for step in (high, low, 0)]
    for age_s, path in enumerate(reversed(order)):  # the largest step was touched first
        os.utime(path, (1e9 - 100 * age_s, 1e9 - 100 * age_s))
    put(root / "before the first step", "step_0")
    put(root / "halves", f"step_{low}")
    put(root / "halves", f"step_{high}.half", whole=False)
    put(root / "only halves", f"step_{high}.half", whole=False)
    put(root / "strangers", f"step_{low}")
    for name in ("best", "step_last", "step_", f"old_step_{high}", f"step_{high}.bak", f"restep_{high}"):
        put(root / "strangers", name)
    put(root / "strangers" / "another run", f"step_{high}")
    (root / "strangers" / "notes.txt").write_text("7")
    (root / "empty").mkdir()
    by_number, halves = (
        "what of a checkpoint tells its step, and is 10 more than 9?",
        "what tells whole ones from halves?",
    )
    nothing = "what comes of a search that finds nothing?"
    return [
        (root / "several", f"step_{high}", by_number),
        (root / "before the first step", "step_0", "what step may a run save that has not begun?"),
        (root / "halves", f"step_{low}", halves),
        (root / "only halves", None, halves),
        (root / "strangers", f"step_{low}", "which names can save_checkpoint have given?"),
        (root / "empty", None, nothing),
        (root / "missing", None, nothing),
    ]


def probe_saving(save_checkpoint, plan: Saving, folder: str, step: int, seed: int, x, y) -> None:
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x, y)
    save_checkpoint(Path(folder), step, module, optimizer)


def what_was_left_goes_first(attempt: Attempt) -> None:
    """Of the same step, that is: other steps stay, of whatever names."""
    plan, draw = Saving("Blocks", sharded=attempt.world_size > 1), Draw(attempt)
    step = attempt.random.randrange(10, 10**6)
    others = ("step_3", f"step_{step}0")
    left_sets = (("step_{}", "step_{}.half"), ("step_{}.half",))
    for left in (each for each in left_sets if attempt.world_size == 1 or len(each) == 2):
        with tempfile.TemporaryDirectory() as folder:
            for name in (*left, *others):
                put(Path(folder), name.format(step))
            said = f"where {' and '.join(names_in(folder))} are, save_checkpoint() of step {step}"
            per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
            attempt.run(probe_saving, plan, folder, step, per_rank=per_rank, context=said)
            names = names_in(folder)
            expected = sorted([*others, f"step_{step}"])
            if names != expected:
                hint = "Look at: which two names does a step have, and who clears them before ranks write?"
                raise Wrong(f"{said} leaves {', '.join(names)}; expected {', '.join(expected)}", hint)
            for name in expected:
                stays = name in others
                if (Path(folder) / name / JUNK).exists() is not stays:
                    hint = "Look at: what may be in a folder that is there already?"
                    raise Wrong(f"{said}: {JUNK} in {name} {'is gone' if stays else 'is still there'}", hint)
