"""Judge how a folder is read and cleaned up that contains complete and incomplete checkpoints, and other files."""

import contextlib
import os
import random
from pathlib import Path

from shared.checks.checkpoints.saved import Saving, settle, train
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.folders import shared_folder
from shared.checks.engine.training import Draw

JUNK = "__99_0.distcp"  # a file of a rank that no longer exists


def put_checkpoint(folder: Path, name: str, whole: bool = True) -> Path:
    """Create a folder that looks like a checkpoint, with its name in the file JUNK. Killed ranks leave no .metadata."""
    path = folder / name
    path.mkdir(parents=True)
    (path / JUNK).write_text(name, encoding="utf-8")
    if whole:
        (path / ".metadata").write_bytes(bytes(64))
    return path


def names_in(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def probe_newest(newest_checkpoint, folders: list[str]) -> list[str | None]:
    found = [newest_checkpoint(Path(folder)) for folder in folders]
    for path in found:
        if not isinstance(path, Path | None):
            raise AssertionError(f"newest_checkpoint() returned a {type(path).__name__}; expected a Path or None")
    return [path if path is None else str(path) for path in found]


def the_largest_step_is_found(attempt: Attempt) -> None:
    with shared_folder() as root:
        cases = _lay_out(Path(root), attempt.random)
        tried = "folders with several checkpoints, incomplete ones, other names such as step_last, and nothing"
        found = attempt.run(probe_newest, [str(folder) for folder, _, _ in cases], context=tried)[0]
        for (folder, expected, hint), path in zip(cases, found, strict=True):
            inside = ", ".join(names_in(folder)) if folder.exists() else "nothing, since it does not exist"
            context = f"newest_checkpoint() of a folder with {inside or 'nothing'} returned {path and Path(path).name}"
            if path != (expected and str(folder / expected)):
                raise Wrong(f"{context}; expected {expected}", f"Hint: {hint}")


def _lay_out(root: Path, draw: random.Random) -> list[tuple[Path, str | None, str]]:
    """Create the folders. Return, for each, its path, the name to be found, and a hint."""
    low = 10 ** draw.randrange(1, 5) - draw.randrange(1, 3)
    high = low + draw.randrange(2, 9)  # one digit more
    order = [put_checkpoint(root / "several", f"step_{step}") for step in (high, low, 0)]
    for age_s, path in enumerate(reversed(order)):  # The largest step is the oldest.
        os.utime(path, (1e9 - 100 * age_s, 1e9 - 100 * age_s))
    put_checkpoint(root / "before the first step", "step_0")
    put_checkpoint(root / "incomplete", f"step_{low}")
    put_checkpoint(root / "incomplete", f"step_{high}.half", whole=False)
    put_checkpoint(root / "only incomplete", f"step_{high}.half", whole=False)
    put_checkpoint(root / "other names", f"step_{low}")
    for name in ("best", "step_last", "step_", f"old_step_{high}", f"step_{high}.bak", f"restep_{high}", f"{high}"):
        put_checkpoint(root / "other names", name)
    put_checkpoint(root / "other names" / "another run", f"step_{high}")
    (root / "other names" / "notes.txt").write_text("7", encoding="utf-8")
    (root / "empty").mkdir()
    by_number, completeness = (
        "which part of a checkpoint's name is its step, and how does step_10 sort after step_9?",
        "how do you distinguish complete checkpoints from incomplete ones?",
    )
    nothing = "what does your search return if it finds nothing?"
    return [
        (root / "several", f"step_{high}", by_number),
        (root / "before the first step", "step_0", "which step does a run save before its first one?"),
        (root / "incomplete", f"step_{low}", completeness),
        (root / "only incomplete", None, completeness),
        (root / "other names", f"step_{low}", "which names begin with step_, and which of these end with a number?"),
        (root / "empty", None, nothing),
        (root / "missing", None, nothing),
    ]


@contextlib.contextmanager
def removing(after):
    """Call after() whenever a file or a folder has been removed."""
    names = ("unlink", "remove", "rmdir")
    originals = {name: getattr(os, name) for name in names}

    def observed(original):
        def remove(*args, **kwargs):
            original(*args, **kwargs)
            after()

        return remove

    for name, original in originals.items():
        setattr(os, name, observed(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def probe_saving(save_checkpoint, plan: Saving, folder: str, step: int, seed: int, x, y) -> bool:
    """Save. Return whether step_N was at some moment an earlier checkpoint without some of its files."""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x, y)
    whole, partial = Path(folder) / f"step_{step}", False
    before = set(names_in(whole)) if whole.exists() else set()

    def look() -> None:
        nonlocal partial
        with contextlib.suppress(FileNotFoundError):
            partial |= set(names_in(whole)) < before

    with removing(look):
        save_checkpoint(Path(folder), step, module, optimizer)
    return partial


class _Killed(BaseException):
    """Stands for SIGKILL: no handler of OSError or Exception runs."""


def probe_killed(save_checkpoint, plan: Saving, folder: str, step: int, seed: int, x, y) -> list[str]:
    """Save a step again, and stop when the checkpoint of before is removed halfway. Then save it once more."""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x, y)
    whole = Path(folder) / f"step_{step}"

    def kill() -> None:
        if whole.exists() and not (whole / JUNK).exists():  # it is the new one
            raise _Killed

    with removing(kill), contextlib.suppress(_Killed):
        save_checkpoint(Path(folder), step, module, optimizer)
    save_checkpoint(Path(folder), step, module, optimizer)
    return names_in(folder)


def a_kill_while_removing_is_survived(attempt: Attempt) -> None:
    """Require that a partly removed checkpoint of the same step does not prevent the next save."""
    plan, draw = Saving("Blocks", sharded=False), Draw(attempt)
    step = attempt.random.randrange(10, 10**6)
    with shared_folder() as folder:
        path = put_checkpoint(Path(folder), f"step_{step}")
        (path / "__98_0.distcp").write_bytes(bytes(64))
        context = f"killed while the old checkpoint of step {step} was removed, and then the same step saved again"
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        names = attempt.run(probe_killed, plan, folder, step, per_rank=per_rank, context=context)[0]
        if names != [f"step_{step}"]:
            hint = "Hint: which folders can an attempt at this step leave, and which function removes them?"
            raise Wrong(f"{context}: the folder contains {', '.join(names)}; expected only step_{step}", hint)


def leftovers_are_removed_first(attempt: Attempt) -> None:
    """Require that leftovers of the same step are removed, never under a complete name, and that other steps stay."""
    plan, draw = Saving("Blocks", sharded=attempt.world_size > 1), Draw(attempt)
    step = attempt.random.randrange(10, 10**6)
    others = ("step_3", f"step_{step}0")
    left_sets = (("step_{}", "step_{}.half"), ("step_{}.half",))
    for left in (each for each in left_sets if attempt.world_size == 1 or len(each) == 2):
        with shared_folder() as folder:
            for name in (*left, *others):
                put_checkpoint(Path(folder), name.format(step))
            context = f"in a folder with {', '.join(names_in(folder))}, save_checkpoint() of step {step}"
            per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
            partial = attempt.run(probe_saving, plan, folder, step, per_rank=per_rank, context=context)
            names = names_in(folder)
            expected = sorted([*others, f"step_{step}"])
            if names != expected:
                hint = (
                    "Hint: which folders of this step must be gone before ranks write, "
                    "and which only when the new one is complete?"
                )
                raise Wrong(f"{context} leaves {', '.join(names)}; expected {', '.join(expected)}", hint)
            for name in expected:
                stays, path = name in others, Path(folder) / name / JUNK
                if path.exists() is not stays:
                    hint = "Hint: which files may be in a folder that already exists?"
                    what = f"{JUNK} in {name} is gone" if stays else f"{name} contains {JUNK}, a file of the old "
                    raise Wrong(f"{context}: {what}{'' if stays else path.read_text(encoding='utf-8')}", hint)
            if any(partial):
                evidence = f"{context} deletes the old checkpoint while it is still called step_{step}"
                hint = "Hint: after a kill halfway through this removal, what would newest_checkpoint() return?"
                raise Wrong(f"{evidence}; expected no partial folder with this name", hint)
