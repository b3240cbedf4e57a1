"""Judge what is visible of a checkpoint while ranks write it, or after one of them fails.

Ranks write through torch's FileSystemWriter, where these checks delay one rank or simulate a full disk.
"""

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from shared.checks.checkpoints.folder import JUNK, names_in, put_checkpoint
from shared.checks.checkpoints.saved import Saving, beside, settle, train
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.folders import shared_folder
from shared.checks.engine.late_ranks import Rendezvous, launches_unasked
from shared.checks.engine.training import Draw
from shared.deadlines import scaled
from shared.ranks import rankside

EARLIER = "step_3"
SLOW_RENAME_S = scaled(0.5)  # Without waiting for it, save_checkpoint() returns within a few milliseconds.
_HINT_ON_NAMES = "Hint: under which name do ranks write, and when does the folder get its final name?"
_HINT_ON_RETURN = "Hint: which rank renames, and how do the other ranks learn that it has finished?"
_HINT_ON_THE_SAME_STEP = "Hint: when is it safe to remove the existing checkpoint of the same step?"


@contextlib.contextmanager
def writing(around):
    """Replace each rank's write() by around(write)."""
    original = FileSystemWriter.write_data

    def write_data(self, *args, **kwargs):
        return around(lambda: original(self, *args, **kwargs))

    FileSystemWriter.write_data = write_data
    try:
        yield
    finally:
        FileSystemWriter.write_data = original


@contextlib.contextmanager
def renaming(before):
    """Call before(new_name) before each rename, and make time.sleep() return at once, so sleeping does not help."""
    originals = os.rename, os.replace, time.sleep

    def slowed(original):
        def rename(source, target, **kwargs):
            before(Path(target).name)
            return original(source, target, **kwargs)

        return rename

    os.rename, os.replace, time.sleep = *map(slowed, originals[:2]), lambda _: None
    try:
        yield
    finally:
        os.rename, os.replace, time.sleep = originals


def newest_in(save_checkpoint, folder: str) -> str | None:
    path = beside(save_checkpoint, "newest_checkpoint")(Path(folder))
    return path and Path(path).name


# -- a rank that writes late


@dataclass
class Seen:
    names: list[str] | None = None  # on the late rank, if it writes: what is in the folder when all others have written
    newest: str | None = None  # the newest checkpoint at that time
    end: str | None = None  # the newest checkpoint when save_checkpoint() has returned


def probe_late(save_checkpoint, plan: Saving, folder: str, step: int, late: int, token: int, seed: int, x, y) -> Seen:
    """Let one rank write after all others."""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x.to(device_here()), y.to(device_here()))
    meeting, seen = Rendezvous(f"checkpoint{token}"), Seen()

    def around(write):
        if dist.get_rank() == late and seen.names is None:
            meeting.missing()
            seen.names, seen.newest = names_in(folder), newest_in(save_checkpoint, folder)
        written = write()
        meeting.arrive()
        return written

    with launches_unasked(), writing(around):
        save_checkpoint(Path(folder), step, module, optimizer)
    seen.end = newest_in(save_checkpoint, folder)
    return seen


def partial_checkpoints_are_never_visible(attempt: Attempt) -> None:
    size, step = attempt.world_size, attempt.random.randrange(10, 10**6)
    for late in (0, 1) if size == 2 else (attempt.random.randrange(1, size),):
        plan, draw = Saving("Blocks", sharded=late != 1 or size != 2), Draw(attempt)
        with shared_folder() as folder:
            put_checkpoint(Path(folder), EARLIER)
            per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
            args = (plan, folder, step, late, attempt.draw_seed())
            seen = attempt.run(probe_late, *args, per_rank=per_rank, context=f"rank {late} writes last")
        if seen[late].names is None:
            hint = "Hint: which function of torch.distributed.checkpoint saves a state, and which ranks must call it?"
            raise Wrong(
                {late: "this rank wrote nothing through torch.distributed.checkpoint; expected its shard"}, hint
            )
        context = f"while rank {late} has not written yet"
        if f"step_{step}" in seen[late].names:
            raise Wrong(f"{context}, step_{step} exists already; expected only the earlier checkpoint", _HINT_ON_NAMES)
        if seen[late].newest != EARLIER:
            evidence = f"{context}, newest_checkpoint() finds {seen[late].newest}; expected {EARLIER}"
            raise Wrong(evidence, "Hint: does the previous checkpoint still exist?")
        on_some_ranks = any(each.end == f"step_{step}" for each in seen)
        for rank, each in enumerate(seen):
            if each.end != f"step_{step}":
                evidence = f"when save_checkpoint() has returned, newest_checkpoint() finds {each.end}"
                hint = _HINT_ON_RETURN if on_some_ranks else _HINT_ON_NAMES
                raise Wrong({rank: f"{evidence}; expected step_{step}"}, hint)


# -- a disk that is full


@dataclass
class Failed:
    raised: bool = False  # whether save_checkpoint() raised
    newest: str | None = None  # the newest checkpoint after that
    files: dict[str, bool] = field(default_factory=dict)  # by folder: whether a file is in it that was there before


def probe_failure(save_checkpoint, plan: Saving, folder: str, step: int, failing: int, seed: int, x, y) -> Failed:
    """Fail while one rank writes."""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x.to(device_here()), y.to(device_here()))
    found = Failed()

    def around(write):
        if dist.get_rank() == failing:
            raise OSError(28, "No space left on device")
        return write()

    with writing(around):
        try:
            save_checkpoint(Path(folder), step, module, optimizer)
        except BaseException as error:
            if isinstance(error, NotImplementedError):
                raise
            found.raised = True
    dist.barrier()
    found.newest = newest_in(save_checkpoint, folder)
    found.files = {name: (Path(folder) / name / JUNK).exists() for name in names_in(folder)}
    return found


def probe_again(save_checkpoint, plan: Saving, folder: str, step: int, seed: int, x, y) -> str | None:
    """Save with enough space. Return the name of the newest checkpoint."""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x.to(device_here()), y.to(device_here()))
    save_checkpoint(Path(folder), step, module, optimizer)
    return newest_in(save_checkpoint, folder)


def a_failure_keeps_the_previous_checkpoint(attempt: Attempt) -> None:
    step = attempt.random.randrange(10, 10**6)
    for kept in (EARLIER, f"step_{step}"):
        _fail_to_save(attempt, step, kept)


def _fail_to_save(attempt: Attempt, step: int, kept: str) -> None:
    """Require that a checkpoint survives a failed attempt to save one, even one of the same step."""
    failing = attempt.random.randrange(attempt.world_size)
    plan, draw = Saving("Blocks", sharded=attempt.world_size > 1), Draw(attempt)
    context = f"rank {failing}'s disk is full while it saves step_{step}, and {kept} exists"
    with shared_folder() as folder:
        put_checkpoint(Path(folder), kept)
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        found = attempt.run(probe_failure, plan, folder, step, failing, per_rank=per_rank, context=context)
        _judge_failure(found, step, kept, context)
        left = ", ".join(names_in(folder))
        context = f"rank {failing}'s disk was full, then step_{step} was saved again, next to {left}"
        again = attempt.run(probe_again, plan, folder, step, per_rank=per_rank, context=context)
    wrong = {
        rank: f"{context}: newest_checkpoint() finds {name}; expected step_{step}"
        for rank, name in enumerate(again)
        if name != f"step_{step}"
    }
    if wrong:
        raise Wrong(wrong, "Hint: what did the first attempt leave in the folder?")


def _judge_failure(found: list[Failed], step: int, kept: str, context: str) -> None:
    """Judge what a failed save has left.

    Raises:
        Wrong: If the earlier checkpoint is not the newest one, or if save_checkpoint() returned normally on a rank.
    """
    for rank, each in enumerate(found):
        survives = each.newest == kept and each.files[kept]
        if not survives or f"step_{step}" in set(each.files) - {kept}:
            evidence = f"{context}: newest_checkpoint() then finds {each.newest}; expected the earlier {kept}"
            evidence += f". The folder contains {', '.join(each.files)}"
            raise Wrong({rank: evidence}, _HINT_ON_NAMES if kept == EARLIER else _HINT_ON_THE_SAME_STEP)
        if not each.raised:
            hint = "Hint: how can the training loop learn that nothing was saved?"
            raise Wrong(
                {rank: f"{context}, but save_checkpoint() returned normally; expected it to raise on every rank"}, hint
            )


# -- a slow rename


@dataclass
class Returned:
    renames: bool = False  # whether this rank renames the folder
    there: bool = False  # whether the folder has its final name when this rank returns


def probe_meeting(save_checkpoint, plan: Saving, folder: str, step: int, token: int, seed: int, x, y) -> Returned:
    """Delay the rename until another rank has returned, or until a timeout."""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x.to(device_here()), y.to(device_here()))
    back = dist.PrefixStore(f"renamed{token}", rankside.here.store)

    sleep, found = time.sleep, Returned()

    def before(name: str) -> None:
        if name != f"step_{step}":
            return
        found.renames, began_s = True, time.monotonic()
        while time.monotonic() - began_s < SLOW_RENAME_S and not back.check(["back"]):
            sleep(1e-3)

    with renaming(before):
        save_checkpoint(Path(folder), step, module, optimizer)
        found.there = (Path(folder) / f"step_{step}").exists()
    back.set("back", "yes")
    return found


def every_rank_returns_after_the_rename(attempt: Attempt, probe=probe_meeting, name: str = "save_checkpoint()") -> None:
    plan, draw, step = Saving("Blocks"), Draw(attempt), attempt.random.randrange(10, 10**6)
    with shared_folder() as folder:
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        found = attempt.run(probe, plan, folder, step, attempt.draw_seed(), per_rank=per_rank)
    evidence = f"{name} returned before step_{step} existed"
    wrong = {rank: evidence for rank, each in enumerate(found) if not each.there}
    if wrong:
        raise Wrong(wrong, _HINT_ON_RETURN)
    if not any(each.renames for each in found):
        evidence = f"step_{step} exists, but no rank renamed a folder to it; expected one rename"
        raise Wrong(evidence, "Hint: if ranks are killed while they write into it, what do they leave behind?")
