# ---
# jupyter:
#   course:
#     module: checkpoints
#     minutes: 60
# ---

# %% [markdown]
# # Lab 12 · Checkpoints
#
# **60 minutes, 7 points.** You write sharded checkpoints that are either complete or not there, whatever happens during
# a save. Any number of ranks can load them. At the end, you kill a run while it saves, and resume it on two ranks.
# Exercise 12.4 is a stretch exercise. Without it, the lab takes 45 minutes and is worth 5 points.
#
# You write four pieces, one in each exercise:
#
# - `newest_checkpoint` finds the checkpoint from which to resume,
# - `save_checkpoint` writes one,
# - `load_checkpoint` restores one,
# - `BackgroundSaver` writes one while training goes on (a stretch exercise).
#
# Each exercise has a check. The checks delay ranks and make writes fail, but they never judge times.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import checkpoints as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Sharded checkpoints that no crash can corrupt, and that any number of ranks can load."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,  # noqa: F401, for your solution
    set_state_dict,
)

from shared.sharded.checkpoints import states_of, states_to_load

# %% [markdown]
# Sooner or later, a large run is killed during a save. What it leaves behind must not be mistaken for a checkpoint, and
# the previous checkpoint must still be there. As in the lesson, the folder's name tells them apart: a checkpoint is
# written into `step_1000.half`, and renamed to `step_1000` when it is complete.
#
# ## Exercise 12.1 · The newest checkpoint (5 min, 1 point)
#
# `newest_checkpoint(folder)` returns the path of the complete checkpoint with the largest step.
#
# - The name of a complete checkpoint is `step_`, followed by a number and nothing else. No file has such a name.
# - Ignore files and folders with other names, and the contents of those folders.
# - Return None if there is no checkpoint, and also if the folder does not exist.
#
# <details><summary>Hint</summary>Which is larger, <code>"step_9"</code> or <code>"step_10"</code>? And 9 or 10? Which
# method of a string tells you whether it is a number?</details>


# %% tags=["exercise", "export"] grade_id="newest-checkpoint"
# %%ranks
def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the largest step, or None if there is none."""
    ### BEGIN SOLUTION
    suffixes = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    steps = {path: int(suffix) for path, suffix in suffixes.items() if suffix.isdigit()}
    return max(steps, key=steps.get, default=None)
    ### END SOLUTION


# %% [markdown]
# Try it on a folder with two checkpoints and two other folders. It should print `step_10`.

# %%
import tempfile
from pathlib import Path

place = tempfile.TemporaryDirectory()
folder = Path(place.name)
for name in ("step_9", "step_10", "step_12.half", "notes"):
    (folder / "example" / name).mkdir(parents=True)
print(ranks.run(lambda path: newest_checkpoint(path).name, folder / "example")[0])

# %% tags=["check"] grade_id="check-newest-checkpoint" points=1
check.newest_checkpoint()

# %% [markdown]
# ## Exercise 12.2 · Complete or not there (20 min, 2 points)
#
# A save removes what an earlier attempt has left, then writes, then renames. You write three functions, each of which
# all ranks call together:
#
# - `begin_checkpoint(folder, step)` removes what an earlier attempt at this step has left, including every folder that
#   your own `complete_checkpoint` can leave behind. It returns the folder into which the ranks write,
#   `folder / f"step_{step}.half"`.
# - `complete_checkpoint(folder, step)` renames this folder to `folder / f"step_{step}"`. No rank returns from it before
#   the folder has its final name.
# - `save_checkpoint(folder, step, model, optimizer)` calls both. Between them, it calls `dcp.save`, in which each rank
#   writes its shards of `{"model": …, "optimizer": …, "step": step}`. `get_state_dict(model, optimizer)` returns the
#   state of the model and that of the optimizer.
#
# Begin with the lesson's short version. You need not flush the parent folder. Then make it robust:
#
# - A complete checkpoint of the same step may exist. Keep it until the new one is ready to take its name. A kill can
#   come at any time, even while you delete, so a partial folder must never be called `step_N`. But for a moment, there
#   may be no `step_N` at all. After a kill at that moment, the run resumes from an earlier step.
# - If a rank fails to write, `save_checkpoint` raises on all ranks, and nothing is renamed.
# - Target: each rank writes its own shards, and no rank gathers those of the others.
#
# You can assume that the optimizer has taken a step. (If it has not, `get_state_dict` lets it step once with gradients
# of zero. Our solution avoids that: it calls `states_of(model, optimizer)` instead.)
#
# <details><summary>Hint 1: who does what, and when?</summary>Rank 0 alone can remove and rename. How do the other ranks
# learn that it has renamed the folder? (In <code>dcp.save</code>, no rank writes before rank 0 has joined.)</details>
#
# <details><summary>Hint 2: the same step again</summary><code>rename</code> does not replace a folder that has files in
# it. If you delete that folder first and are killed halfway, a part of it remains under the name of a complete
# checkpoint. Which name could it get before you delete it? And which folders do you have to remove at the
# beginning?</details>


# %% tags=["exercise", "export"] grade_id="save-checkpoint"
# %%ranks
def begin_checkpoint(folder: Path, step: int) -> Path:
    """Remove what earlier attempts at this step have left. Returns the folder for the shards."""
    ### BEGIN SOLUTION
    unfinished, replaced = (folder / f"step_{step}{suffix}" for suffix in (".half", ".old"))
    if dist.get_rank() == 0:
        for leftover in (unfinished, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    dist.barrier()  # no rank returns before the leftovers are removed
    return unfinished
    ### END SOLUTION


def complete_checkpoint(folder: Path, step: int) -> None:
    """Give a checkpoint its final name, when all ranks have written their shards."""
    ### BEGIN SOLUTION
    complete, unfinished, replaced = (
        folder / f"step_{step}{suffix}" for suffix in ("", ".half", ".old")
    )
    if dist.get_rank() == 0:
        if complete.exists():
            # A kill during a deletion would leave an incomplete checkpoint, so it must not have this name any more.
            complete.rename(replaced)
        unfinished.rename(complete)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()  # no rank may return before rank 0 has renamed the folder
    ### END SOLUTION


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint that gets its final name only when it is complete. To be called by all ranks."""
    ### BEGIN SOLUTION
    unfinished = begin_checkpoint(folder, step)
    model_state, optimizer_state = states_of(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=unfinished)  # if one rank fails, it raises on all ranks
    complete_checkpoint(folder, step)
    ### END SOLUTION


# %% [markdown]
# Try it on a single layer, which `fully_sharded` from lab 11 shards. It should print `['step_1']`, and then the names
# of five files: the list `.metadata`, and one file per rank.

# %%
# %%ranks
from solutions.production import fully_sharded


def small_run():
    """Build a sharded layer and its optimizer, and take one step."""
    model = fully_sharded(nn.Linear(8, 8).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


# %%
def names_in(path):
    return sorted(inner.name for inner in path.iterdir())


small = Path(tempfile.mkdtemp(dir=folder))  # a new folder each time that you run this cell
ranks.run(lambda path: save_checkpoint(path, 1, *small_run()), small)
print(names_in(small))
print(names_in(small / "step_1"))

# %% [markdown]
# Do you see the gap that is left? Between two renames, the old checkpoint of this step is complete, and so is the new
# one, but neither has the name that counts. Could a search find one of them? Think first, then open the answer.
#
# <details><summary>Answer</summary>The old one. Suppose that its name is then <code>step_N.old</code>. It is whole as
# long as there is no <code>step_N</code>, because you delete it only after the second rename. So
# <code>newest_checkpoint</code> could accept it then. But <code>begin_checkpoint</code> would have to rename it back,
# instead of deleting it. The exercises do not ask for that.</details>
#
# In the check, look at the line `own shard` first. The lesson's short version passes it, once it also saves the step.
# The other lines delay a write or the rename and look into the folder meanwhile, repeat a step, and make a write fail:

# %% tags=["check"] grade_id="check-save-checkpoint" points=2
check.save_checkpoint()

# %% [markdown]
# ## Exercise 12.3 · Resume on any number of ranks (10 min, 2 points)
#
# `load_checkpoint(path, model, optimizer)` restores the state of the model and of the optimizer, and returns the step.
# The lesson's folded `load` does the same without the step, so write yours before you open it.
#
# - `dcp.load(state, checkpoint_id=path)` loads into the tensors of `state`, in place. `state` must have the same
#   structure as the state that was saved. Values that are not tensors, such as the step, are replaced in the dict, so
#   read the step from `state` after loading.
# - `set_state_dict(model, optimizer, model_state_dict=…, optim_state_dict=…)` gives the two states to the model and to
#   the optimizer. The state of the optimizer also contains settings, such as the learning rate.
# - Loading must work on any number of ranks, no matter how many saved the checkpoint, and also if nothing is sharded.
# - The optimizer may be new. `get_state_dict` then creates its state, and loading replaces it.
#
# Our solution also loads what a real run leaves: a parameter that never had a gradient has no state in the checkpoint,
# and a learning rate scheduler adds settings to the optimizer's groups. It loads into the states of `states_to_load`,
# which have exactly what the checkpoint has. Yours may assume the same of the states of `get_state_dict`.
#
# <details><summary>Hint</summary>You need a state with the right structure before you can load. Which function of
# exercise 12.2 returns one? And which value of the dict is not a tensor?</details>


# %% tags=["exercise", "export"] grade_id="load-checkpoint"
# %%ranks
def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, which any number of ranks may have written. Returns its step."""
    ### BEGIN SOLUTION
    with states_to_load(path, model, optimizer) as (model_state, optimizer_state):
        state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=path)  # fills the tensors in place and replaces the step
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),  # some parameters may have no state
        )
    return state["step"]
    ### END SOLUTION


# %% [markdown]
# Try it: two ranks load what four have saved. It should print `[1, 1]`, the step on each of them.

# %%
with ranks.world(2):
    steps = ranks.run(lambda path: load_checkpoint(path, *small_run()), small / "step_1")
print(steps)

# %% [markdown]
# In the check, look at the line `plain` first: it saves and resumes on two ranks. The line `resumed` loads into new
# models on other numbers of ranks. Both compare all later steps with an uninterrupted run. The line `earlier
# checkpoint` goes back to an earlier checkpoint within the same run.

# %% tags=["check"] grade_id="check-load-checkpoint" points=2
check.load_checkpoint()

# %% [markdown]
# ## Exercise 12.4 · Stretch: saving in the background (15 min, 2 points)
#
# `BackgroundSaver` saves while training goes on. All ranks create one, and call its two methods together:
#
# ```python
# saver = BackgroundSaver()
# for step in range(1, 1001):
#     train_one_step()
#     if step % 100 == 0:
#         saver.save(folder, step, model, optimizer)  # returns when the shards are staged
# saver.wait()  # returns when the last checkpoint is complete
# ```
#
# The folders and names are those of exercise 12.2. Follow the lesson's three rules:
#
# - `__init__` creates a gloo process group for the saves, because training uses its own at the same time.
# - `save` first waits for the previous save. Then it prepares the folder, starts `dcp.async_save` in that group, and
#   returns while a thread writes.
# - `wait` returns when the checkpoint has its final name. If there is nothing to wait for, it returns at once.
# - If a rank has failed to write, `wait` raises on all ranks, and nothing is renamed. If you did not call `wait`, the
#   next `save` raises this error. After the error, the saver can save again.
#
# <details><summary>Hint 1</summary>Which functions of exercise 12.2 can you call, and in which of the two methods? What
# does <code>wait</code> have to know about the save?</details>
#
# <details><summary>Hint 2: after a failure</summary>If <code>future.result()</code> raises, the next line of
# <code>wait</code> is not executed. What would the next call of <code>wait</code> find?</details>


# %% tags=["exercise", "export"] grade_id="background-saver"
# %%ranks
class BackgroundSaver:
    """Saves in a thread while training goes on, one checkpoint at a time. To be used by all ranks."""

    def __init__(self):
        ### BEGIN SOLUTION
        self._group = dist.new_group(backend="gloo")
        self._pending = None  # the future of the save in flight, and its folder and step
        ### END SOLUTION

    def save(
        self, folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for the save before this one, and start to save. Returns when the shards are staged.

        Memory: a copy of this rank's shards, on the CPU, until they are written.
        """
        ### BEGIN SOLUTION
        self.wait()
        unfinished = begin_checkpoint(folder, step)
        model_state, optimizer_state = states_of(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step}
        future = dcp.async_save(state, checkpoint_id=unfinished, process_group=self._group)
        self._pending = future, folder, step
        ### END SOLUTION

    def wait(self) -> None:
        """Wait until the checkpoint that save() has started is complete. Raises if it could not be written."""
        ### BEGIN SOLUTION
        if self._pending is None:
            return
        (future, folder, step), self._pending = self._pending, None
        future.result()  # if one rank has failed, it raises on all ranks
        complete_checkpoint(folder, step)
        ### END SOLUTION


# %% [markdown]
# Try it on the same layer as before, in a new folder. It should print `['step_1', 'step_2']`.


# %%
# %%ranks
def save_in_background(folder):
    model, optimizer = small_run()
    saver = BackgroundSaver()
    saver.save(folder, 1, model, optimizer)
    saver.save(folder, 2, model, optimizer)
    saver.wait()


# %%
small = Path(tempfile.mkdtemp(dir=folder))
ranks.run(lambda path: save_in_background(path), small)
print(names_in(small))

# %% [markdown]
# In the check, the line `plain` saves and waits. The line `own group` looks for collectives in training's process
# group. The other lines delay writes or the rename while the ranks train on or save again, and make a write fail.

# %% tags=["check"] grade_id="check-background-saver" points=2
check.BackgroundSaver()

# %% [markdown]
# ## Your run, killed (10 min)
#
# This part has no points. `job` is a training script as a cluster would run it. It looks for the newest checkpoint by
# itself, resumes from there, and saves every ten steps. If `killed_at` is given, the last rank is killed during the
# save after that step.


# %%
# %%ranks
import os
import signal

from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def job(folder, killed_at=None):
    """Train until step 40. Returns the step from which this began, and the losses since then."""
    text = CharTokens()
    model = fully_sharded(TinyGPT(GPTConfig(vocab_size=text.vocab_size)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    newest = newest_checkpoint(folder)
    began_at = load_checkpoint(newest, model, optimizer) if newest else 0
    losses = []
    for step in range(began_at, 40):
        batch = text.windows(range(200 * step, 200_000, 25_000), length=32)
        optimizer.zero_grad()
        loss = model(*(tensor[rank::world_size].to(device) for tensor in batch))
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / world_size)
        if step + 1 == killed_at and rank == world_size - 1:
            dcp.FileSystemWriter.write_data = die
        if (step + 1) % 10 == 0:
            save_checkpoint(folder, step + 1, model, optimizer)
    return began_at, losses


# %% [markdown]
# **Predict.** The job is killed during the save after step 30. From which step does it resume, and which folders are
# there at that time?

# %%
my_prediction_step = None
my_prediction_folders = None

# %% tags=["nbval-ignore-output"]
_, expected = ranks.run(lambda path: job(path), folder / "not interrupted")[0]
try:
    ranks.run(lambda path: job(path, killed_at=30), folder / "killed")
except ranks.CellFailed as failed:
    print(failed)

# %%
from shared.predictions import predicted

names = names_in(folder / "killed")
print(f"{predicted(my_prediction_folders)}found {names}")
assert names == ["step_10", "step_20", "step_30.half"]

# %% [markdown]
# The next cell starts the same job again, but on two ranks only. In the figure, its line begins where the job resumes.

# %% tags=["nbval-ignore-output"]
with ranks.world(2):
    began_at, losses = ranks.run(lambda path: job(path), folder / "killed")[0]
print(f"{predicted(my_prediction_step, 'step {}')}resumed from step {began_at}")
difference = max(abs(x - y) for x, y in zip(losses, expected[began_at:], strict=True))
assert began_at == 20 and difference < 0.02
assert names_in(folder / "killed") == ["step_10", "step_20", "step_30", "step_40"]
not_repeated = [float("nan")] * began_at
plots.loss_curves({"4 ranks, not interrupted": expected, "resumed on 2": not_repeated + losses})

# %% [markdown]
# The run has lost ten steps, and nothing else. The second attempt at step 30 has also removed what the first one had
# left. Old checkpoints stay until somebody deletes them. If you write a function for that, make sure that it never
# deletes the newest complete one.
#
# Here, each rank looks for the newest checkpoint by itself. On a network file system, one host may see a rename seconds
# after another, and then the ranks would resume from different steps. So on a cluster, let rank 0 look, and broadcast
# what it has found.

# %%
place.cleanup()
# %%
ranks.stop()
