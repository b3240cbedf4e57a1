"""What others see of a checkpoint while ranks write it, or when one of them fails.

Ranks write through torch's FileSystemWriter: there a rank is made to come late, or its disk to be full.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from shared.checks.checkpoints.folder import names_in, put
from shared.checks.checkpoints.saved import Saving, beside, settle, train
from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.latecomers import Meeting, launches_unasked
from shared.checks.engine.training import Draw
from shared.deadlines import scaled
from shared.ranks import rankside

EARLIER = "step_3"
SLOW_RENAME_S = scaled(0.5)  # who does not wait for it is back in a few milliseconds
_LOOK_AT_NAMES = "Look at: under which name do ranks write, and when does it get the other?"


@contextlib.contextmanager
def writing(around):
    """Let around(write), in the place of each rank's own write(), write what that rank has."""
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
    """Call before(the new name) before each rename; who sleeps until it must be done is woken at once."""
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


def probe_late(save_checkpoint, plan: Saving, folder: str, step: int, late: int, token: int, seed: int, x, y) -> dict:
    """→ on the late rank, what is in the folder when the others have written and it has not"""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x.to(device_here()), y.to(device_here()))
    meeting, seen = Meeting(f"checkpoint{token}"), {}

    def around(write):
        if dist.get_rank() == late and not seen:
            meeting.missing()
            seen.update(names=names_in(folder), newest=newest_in(save_checkpoint, folder))
        written = write()
        meeting.come()
        return written

    with launches_unasked(), writing(around):
        save_checkpoint(Path(folder), step, module, optimizer)
    return seen | {"end": newest_in(save_checkpoint, folder)}


def nobody_sees_a_part(attempt: Attempt) -> None:
    size, step = attempt.world_size, attempt.random.randrange(10, 10**6)
    for late in (0, 1) if size == 2 else (attempt.random.randrange(1, size),):
        plan, draw = Saving("Blocks", sharded=late != 1 or size != 2), Draw(attempt)
        with tempfile.TemporaryDirectory() as folder:
            put(Path(folder), EARLIER)
            per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
            args = (plan, folder, step, late, attempt.draw_seed())
            seen = attempt.run(probe_late, *args, per_rank=per_rank, context=f"rank {late} writes last")
        if "names" not in seen[late]:
            hint = "Look at: which function does torch.distributed.checkpoint have for this, and who calls it?"
            raise Wrong({late: "this rank writes nothing through torch.distributed.checkpoint"}, hint)
        said = f"while rank {late} has not written yet"
        if f"step_{step}" in seen[late]["names"]:
            raise Wrong(f"{said}, step_{step} is there already", _LOOK_AT_NAMES)
        if seen[late]["newest"] != EARLIER:
            evidence = f"{said}, newest_checkpoint() finds {seen[late]['newest']}; expected {EARLIER}"
            raise Wrong(evidence, "Look at: is the one before still there?")
        for rank, each in enumerate(seen):
            if each["end"] != f"step_{step}":
                evidence = f"when save_checkpoint() is back, newest_checkpoint() finds {each['end']}"
                raise Wrong({rank: f"{evidence}; expected step_{step}"}, _LOOK_AT_NAMES)


# -- a disk that is full


def probe_failure(save_checkpoint, plan: Saving, folder: str, step: int, failing: int, seed: int, x, y) -> dict:
    """Fail while this rank writes, then try again. → was it told, and the newest checkpoint after each"""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x.to(device_here()), y.to(device_here()))
    found = {"told": False}

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
            found["told"] = True
    dist.barrier()
    found["names"], found["failed"] = names_in(folder), newest_in(save_checkpoint, folder)
    dist.barrier()
    save_checkpoint(Path(folder), step, module, optimizer)
    return found | {"again": newest_in(save_checkpoint, folder)}


def a_failure_leaves_the_last_one(attempt: Attempt) -> None:
    step, failing = attempt.random.randrange(10, 10**6), attempt.random.randrange(attempt.world_size)
    plan, draw = Saving("Blocks", sharded=attempt.world_size > 1), Draw(attempt)
    said = f"rank {failing}'s disk is full"
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), EARLIER)
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        found = attempt.run(probe_failure, plan, folder, step, failing, per_rank=per_rank, context=said)
    for rank, each in enumerate(found):
        if f"step_{step}" in each["names"] or each["failed"] != EARLIER:
            evidence = f"{said}: then newest_checkpoint() finds {each['failed']}; expected {EARLIER}"
            raise Wrong({rank: f"{evidence}. In the folder are {', '.join(each['names'])}"}, _LOOK_AT_NAMES)
        if not each["told"]:
            hint = "Look at: how will the training loop learn that nothing was saved?"
            raise Wrong({rank: f"{said}, and save_checkpoint() comes back as if nothing had happened"}, hint)
        if each["again"] != f"step_{step}":
            evidence = f"{said}; when it is saved again, newest_checkpoint() finds {each['again']}"
            raise Wrong({rank: evidence}, "Look at: what did the first try leave behind?")


# -- a slow rename


def probe_meeting(save_checkpoint, plan: Saving, folder: str, step: int, token: int, seed: int, x, y) -> dict:
    """→ does this rank rename it, and is it there when this rank is back?"""
    module, optimizer = settle(plan, seed)
    train(module, optimizer, range(1), x.to(device_here()), y.to(device_here()))
    back = dist.PrefixStore(f"renamed{token}", rankside.here.store)

    sleep, found = time.sleep, {"renames": False}

    def before(name: str) -> None:
        if name != f"step_{step}":
            return
        found["renames"], began_s = True, time.monotonic()
        while time.monotonic() - began_s < SLOW_RENAME_S and not back.check(["back"]):
            sleep(1e-3)

    with renaming(before):
        save_checkpoint(Path(folder), step, module, optimizer)
        found["there"] = (Path(folder) / f"step_{step}").exists()
    back.set("back", "yes")
    return found


def all_come_back_after_the_rename(attempt: Attempt) -> None:
    plan, draw, step = Saving("Blocks"), Draw(attempt), attempt.random.randrange(10, 10**6)
    with tempfile.TemporaryDirectory() as folder:
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        found = attempt.run(probe_meeting, plan, folder, step, attempt.draw_seed(), per_rank=per_rank)
    said = f"save_checkpoint() is back, and step_{step} is not there yet"
    wrong = {rank: said for rank, each in enumerate(found) if not each["there"]}
    if wrong:
        raise Wrong(wrong, "Look at: who renames, and how do the others learn that it is done?")
    if not any(each["renames"] for each in found):
        said = f"step_{step} comes to be, and nobody has renamed anything to it"
        raise Wrong(said, "Look at: what of it would a kill leave, if it came file by file?")
