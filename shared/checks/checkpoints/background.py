"""Judge a saver that writes while training goes on: the values, folder names, process group and failures.

The probes hold back the writes of the ranks until something else has happened, so no verdict depends on how long a
write takes.
"""

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from shared.checks.checkpoints.crash import (
    Returned,
    every_rank_returns_after_the_rename,
    newest_in,
    probe_meeting,
    renaming,
    writing,
)
from shared.checks.checkpoints.folder import put_checkpoint
from shared.checks.checkpoints.saved import (
    Contents,
    Saving,
    beside,
    contents_of,
    judge_contents,
    settle,
    train,
    whole,
)
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.folders import shared_folder
from shared.checks.engine.late_ranks import PATIENCE_S, launches_unasked
from shared.checks.engine.training import Draw
from shared.deadlines import scaled
from shared.ranks import rankside
from shared.wire import instrumentation

EARLIER = "step_3"
HELD_BACK_S = scaled(0.2)  # enough time for a second save to begin to write, if it does not wait for the first one
_HINT_ON_STAGING = "Hint: does the thread read the tensors that training is changing, or a copy of them?"
_HINT_ON_THREADS = "Hint: which function of torch.distributed.checkpoint writes in a thread, and what does it return?"
_HINT_ON_RENAME = "Hint: when does the folder get its final name, and how do you know that all ranks have written?"


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@dataclass
class Saved:
    saved: Contents = field(default_factory=Contents)  # when save() had returned
    newest: str | None = None  # the newest checkpoint when wait() had returned
    loaded: Contents | None = None  # what was loaded from it, if it is the one that was saved


def _loaded(saver_class, plan: Saving, folder: str, step: int, seed: int) -> Contents:
    """Load a checkpoint into a new model and optimizer, and return their contents."""
    module, optimizer = settle(plan, seed)
    beside(saver_class, "load_checkpoint")(Path(folder) / f"step_{step}", module, optimizer)
    return contents_of(module, optimizer)


def _begun(saver_class, plan: Saving, seed: int, x, y) -> tuple:
    """Return a saver, a model and an optimizer that have taken a step, and their samples."""
    module, optimizer = settle(plan, seed)
    x, y = x.to(device_here()), y.to(device_here())
    train(module, optimizer, range(1), x, y)
    return saver_class(), module, optimizer, x, y


def probe_plain(saver_class, plan: Saving, folder: str, step: int, seed: int, x, y) -> Saved:
    """Save, wait, and load into a new model."""
    saver, module, optimizer, *_ = _begun(saver_class, plan, seed, x, y)
    saver.wait()  # There is nothing to wait for yet.
    saver.save(Path(folder), step, module, optimizer)
    saver.wait()
    found = Saved(contents_of(module, optimizer), newest_in(saver_class, folder))
    dist.barrier()
    if found.newest == f"step_{step}":
        found.loaded = _loaded(saver_class, plan, folder, step, seed + 1)
    return found


def it_saves(attempt: Attempt) -> None:
    plan, draw, step = Saving("Blocks"), Draw(attempt), attempt.random.randrange(10, 10**6)
    with shared_folder() as folder:
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        found = attempt.run(probe_plain, plan, folder, step, per_rank=per_rank, context=str(plan))
    _judge_newest([each.newest for each in found], f"step_{step}", "after save() and wait()")
    _judge_loaded([each.saved for each in found], [each.loaded for each in found], f"{plan}, saved and loaded")


def _judge_newest(found: list[str | None], expected: str, context: str) -> None:
    """Judge which checkpoint newest_checkpoint() finds on each rank.

    Raises:
        Wrong: If it finds another.
    """
    wrong = {
        rank: f"{context}, newest_checkpoint() finds {name}; expected {expected}"
        for rank, name in enumerate(found)
        if name != expected
    }
    if wrong:
        raise Wrong(wrong, _HINT_ON_RENAME)


def _judge_loaded(saved: list[Contents], loaded: list[Contents], context: str) -> None:
    """Judge that what each rank has loaded equals what was saved.

    Raises:
        Wrong: If it differs.
    """
    than = "its value when save() was called"
    judge_contents(loaded, whole(saved), context, than, (_HINT_ON_STAGING, _HINT_ON_STAGING))


# -- training goes on while the ranks write


class Writes:
    """Record in the store which ranks have written, and whether a folder was renamed before all of them had.

    Args:
        token: A number that is used only once.
        name: The final name of the folder.
    """

    def __init__(self, token: int, name: str):
        self._store = dist.PrefixStore(f"writes{token}", rankside.here.store)
        self._name, self._renamed = name, threading.Event()

    def note_written(self) -> None:
        self._store.set(f"{dist.get_rank()}", "written")

    def note_rename(self, name: str) -> None:
        """Note a rename, from the rank that is about to do it."""
        written = (self._store.check([f"{rank}"]) for rank in range(dist.get_world_size()))
        if name == self._name and not all(written):
            self._store.set("early", "yes")
            self._renamed.set()

    def give_time_to_rename(self) -> None:
        """Wait so long that a rank that does not wait for the writes renames the folder in that time."""
        self._renamed.wait(HELD_BACK_S)

    def renamed_early(self) -> bool:
        return self._store.check(["early"])


@dataclass
class HeldBack(Saved):
    wrote: bool = False
    blocked: bool = False  # whether save() returned only after this rank had written
    meanwhile: str | None = None  # the newest checkpoint while no rank had written
    early: bool = False  # whether the folder was renamed before all ranks had written


def probe_held_back(saver_class, plan: Saving, folder: str, step: int, token: int, seed: int, x, y) -> HeldBack:
    """Save, and let the ranks write only after more training. Look into the folder before and after."""
    saver, module, optimizer, x, y = _begun(saver_class, plan, seed, x, y)
    trained, writes = threading.Event(), Writes(token, f"step_{step}")
    found = HeldBack()

    def around(write):
        found.wrote = True
        found.blocked |= _in_main_thread() or not trained.wait(PATIENCE_S)
        writes.give_time_to_rename()
        written = write()
        writes.note_written()
        return written

    with launches_unasked(), renaming(writes.note_rename), writing(around):
        saver.save(Path(folder), step, module, optimizer)
        found.saved = contents_of(module, optimizer)
        train(module, optimizer, range(2), x, y)
        found.meanwhile = newest_in(saver_class, folder)
        trained.set()
        try:
            saver.wait()
        except BaseException:  # torch's CheckpointException is not an Exception
            if not writes.renamed_early():  # otherwise, the thread cannot write, because its folder has another name
                raise
    found.newest = newest_in(saver_class, folder)
    dist.barrier()
    found.early = writes.renamed_early()
    if found.newest == f"step_{step}" and not found.early:
        found.loaded = _loaded(saver_class, plan, folder, step, seed + 1)
    return found


def _hold_back(attempt: Attempt) -> tuple[list[HeldBack], int]:
    """Save while ranks continue to train. Returns what the probe found, by rank, and the step.

    Raises:
        Wrong: If a rank writes nothing.
    """
    plan, draw, step = Saving("Blocks"), Draw(attempt), attempt.random.randrange(10, 10**6)
    with shared_folder() as folder:
        put_checkpoint(Path(folder), EARLIER)
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        args = (plan, folder, step, attempt.draw_seed())
        found = attempt.run(probe_held_back, *args, per_rank=per_rank, context="while training goes on")
    for rank, each in enumerate(found):
        if not each.wrote:
            evidence = "this rank wrote nothing through torch.distributed.checkpoint; expected its shard"
            raise Wrong({rank: evidence}, _HINT_ON_THREADS)
    return found, step


def training_goes_on(attempt: Attempt) -> None:
    found, _ = _hold_back(attempt)
    evidence = "save() returned only after this rank had written; expected it to return when the shards are staged"
    wrong = {rank: evidence for rank, each in enumerate(found) if each.blocked}
    if wrong:
        raise Wrong(wrong, _HINT_ON_THREADS)
    loaded = [each.loaded for each in found if each.loaded is not None]
    if len(loaded) == len(found):
        context = "saved, then trained two more steps while the ranks wrote"
        _judge_loaded([each.saved for each in found], loaded, context)


def unwritten_checkpoints_are_never_visible(attempt: Attempt) -> None:
    found, step = _hold_back(attempt)
    if found[0].early:
        evidence = f"the folder was renamed to step_{step} before all ranks had written; expected it afterwards"
        raise Wrong(evidence, _HINT_ON_RENAME)
    _judge_newest([each.meanwhile for each in found], EARLIER, "while no rank has written yet")
    _judge_newest([each.newest for each in found], f"step_{step}", "when wait() has returned")


# -- the group


@dataclass
class Groups:
    in_world: list[str]  # the calls in training's group that other threads launched
    formed: int  # how many groups two saves formed
    backends: list  # what dist.new_group() was asked for


def probe_groups(saver_class, plan: Saving, folder: str, steps: tuple[int, int], seed: int, x, y) -> Groups:
    """Save twice."""
    with backends_asked_for() as backends:
        saver, module, optimizer, *_ = _begun(saver_class, plan, seed, x, y)
    world, in_world = dist.distributed_c10d._get_default_group().group_name, []

    def note(call, *_) -> None:
        if call.group_name == world and not _in_main_thread():
            in_world.append(str(call))

    groups = [len(dist.distributed_c10d._world.pg_map)]
    with launches_unasked(), instrumentation.listening(launched=note):
        for step in steps:
            saver.save(Path(folder), step, module, optimizer)
            saver.wait()
            groups.append(len(dist.distributed_c10d._world.pg_map))
    return Groups(in_world, groups[-1] - groups[0], backends)


@contextlib.contextmanager
def backends_asked_for():
    """Yield a list of the backends that dist.new_group() is asked for."""
    original, backends = dist.new_group, []

    def new_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
        backends.append(backend)
        return original(ranks, timeout, backend, *args, **kwargs)

    dist.new_group = new_group
    try:
        yield backends
    finally:
        dist.new_group = original


def the_saves_have_their_own_group(attempt: Attempt) -> None:
    plan, draw, step = Saving("Blocks"), Draw(attempt), attempt.random.randrange(10, 10**6)
    with shared_folder() as folder:
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        found = attempt.run(probe_groups, plan, folder, (step, step + 1), per_rank=per_rank)
    for rank, each in enumerate(found):
        if each.in_world:
            evidence = f"the thread called {each.in_world[0]} in the process group of training"
            hint = "Hint: what happens if training calls a collective in this group at the same time?"
            raise Wrong({rank: f"{evidence}; expected a group of its own"}, hint)
        if each.formed > 1:
            evidence = f"two saves formed {each.formed} process groups; expected at most one, for all saves"
            raise Wrong({rank: evidence}, "Hint: which method is called only once?")
        if not all("gloo" in str(backend) for backend in each.backends):
            evidence = "the group for the saves has the backend of training, which may be NCCL; expected gloo"
            raise Wrong({rank: evidence}, "Hint: where are the staged shards, and which backend can send from there?")


# -- the next save


@dataclass
class SavedTwice:
    most: int  # how many saves wrote at the same time
    second: str | None  # the newest checkpoint when the second save() had returned
    newest: str | None  # the newest checkpoint when wait() had returned


def probe_two(saver_class, plan: Saving, folder: str, steps: tuple[int, int], seed: int, x, y) -> SavedTwice:
    """Save twice in a row."""
    saver, module, optimizer, x, y = _begun(saver_class, plan, seed, x, y)
    writes, most, lock, both = 0, 0, threading.Lock(), threading.Event()

    def around(write):
        nonlocal writes, most
        with lock:
            writes += 1
            most = max(most, writes)
            if writes > 1:
                both.set()
        if both.is_set():
            _wait_for_metadata(Path(folder), steps[0])  # Both saves would hang if they communicated at the same time.
        else:
            both.wait(HELD_BACK_S)
        try:
            return write()
        finally:
            with lock:
                writes -= 1

    with launches_unasked(), writing(around):
        saver.save(Path(folder), steps[0], module, optimizer)
        train(module, optimizer, range(1), x, y)
        saver.save(Path(folder), steps[1], module, optimizer)
        second = newest_in(saver_class, folder)
        saver.wait()
    return SavedTwice(most, second, newest_in(saver_class, folder))


def probe_same_step(saver_class, plan: Saving, folder: str, step: int, seed: int, x, y) -> str | None:
    """Save a step twice in a row, like a loop that also saves at its end. Return the newest checkpoint's name."""
    saver, module, optimizer, *_ = _begun(saver_class, plan, seed, x, y)
    saver.save(Path(folder), step, module, optimizer)
    _wait_for_metadata(Path(folder), step)
    saver.save(Path(folder), step, module, optimizer)
    saver.wait()
    return newest_in(saver_class, folder)


def _wait_for_metadata(folder: Path, step: int) -> None:
    """Wait until the first save of two has ended, so that the second one does not disturb it."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < PATIENCE_S and not any(folder.glob(f"step_{step}*/.metadata")):
        time.sleep(1e-3)
    time.sleep(HELD_BACK_S)


def one_save_at_a_time(attempt: Attempt) -> None:
    plan, draw, step = Saving("Blocks"), Draw(attempt), attempt.random.randrange(10, 10**6)
    with shared_folder() as folder:
        per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
        context = "saving twice in a row"
        found = attempt.run(probe_two, plan, folder, (step, step + 1), per_rank=per_rank, context=context)
    wrong = {rank: f"{each.most} saves wrote at the same time" for rank, each in enumerate(found) if each.most > 1}
    if wrong:
        raise Wrong(wrong, "Hint: what must save() do if an earlier save is still running?")
    _judge_newest([each.second for each in found], f"step_{step}", "when the second save() has returned")
    _judge_newest([each.newest for each in found], f"step_{step + 1}", "after the second save() and wait()")
    with shared_folder() as folder:
        context = "saving the same step twice in a row"
        newest = attempt.run(probe_same_step, plan, folder, step, per_rank=per_rank, context=context)
    _judge_newest(newest, f"step_{step}", f"after {context}, and wait()")


# -- a disk that is full


@dataclass
class Failed:
    raised: bool = False  # whether wait() or the next save() raised
    newest: str | None = None  # the newest checkpoint after that
    later: str | None = None  # what the save after that raised, if it did
    again: str | None = None  # the newest checkpoint in the end, if all ranks had raised


def probe_failure(
    saver_class, plan: Saving, folder: str, step: int, failing: int, by_saving: bool, seed: int, x, y
) -> Failed:
    """Let one rank fail to write, and save again."""
    saver, module, optimizer, *_ = _begun(saver_class, plan, seed, x, y)
    found = Failed()

    def around(write):
        if dist.get_rank() == failing:
            raise OSError(28, "No space left on device")
        return write()

    with launches_unasked(), writing(around):
        saver.save(Path(folder), step, module, optimizer)
        try:
            saver.save(Path(folder), step + 1, module, optimizer) if by_saving else saver.wait()
        except BaseException as error:
            if isinstance(error, NotImplementedError):
                raise
            found.raised, first = True, error
    dist.barrier()
    found.newest = newest_in(saver_class, folder)
    dist.barrier()
    all_raised = [False] * dist.get_world_size()
    dist.all_gather_object(all_raised, found.raised)
    if all(all_raised):  # otherwise, the ranks would not save together
        try:
            saver.save(Path(folder), step + 2, module, optimizer)
            saver.wait()
        except BaseException as error:
            found.later = "that same error again" if error is first else f"a {type(error).__name__}"
        found.again = newest_in(saver_class, folder)
    return found


def a_failure_is_reported(attempt: Attempt) -> None:
    for by_saving in (False, True):
        step, failing = attempt.random.randrange(10, 10**6), attempt.random.randrange(attempt.world_size)
        plan, draw = Saving("Blocks", sharded=attempt.world_size > 1), Draw(attempt)
        caller = "the next save()" if by_saving else "wait()"
        context = f"rank {failing}'s disk is full"
        with shared_folder() as folder:
            put_checkpoint(Path(folder), EARLIER)
            per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
            args = (plan, folder, step, failing, by_saving)
            found = attempt.run(probe_failure, *args, per_rank=per_rank, context=f"{context}, and then {caller}")
        _judge_newest([each.newest for each in found], EARLIER, context)
        evidence = f"{context}, but {caller} returned normally"
        wrong = {rank: evidence for rank, each in enumerate(found) if not each.raised}
        if wrong:
            raise Wrong(wrong, "Hint: how does training learn that nothing was saved?")
        failed = (
            f"rank {failing}'s disk was full, so {caller} raised an error. The save after that had space, but raised"
        )
        wrong = {rank: f"{failed} {each.later}" for rank, each in enumerate(found) if each.later is not None}
        if wrong:
            raise Wrong(wrong, "Hint: what does the saver still remember of a save that has failed?")
        context = f"{context}, but not in the next save; after that"
        _judge_newest([each.again for each in found], f"step_{step + 2}", context)


# -- a slow rename


def probe_rename(saver_class, *args) -> Returned:
    """Return what probe_meeting() finds when wait() returns."""

    def save_and_wait(*arguments) -> None:
        saver = saver_class()
        saver.save(*arguments)
        saver.wait()

    return probe_meeting(save_and_wait, *args)


def every_rank_waits_for_the_rename(attempt: Attempt) -> None:
    every_rank_returns_after_the_rename(attempt, probe_rename, "wait()")
