# ---
# jupyter:
#   course:
#     module: checkpoints
#     minutes: 30
# ---

# %% [markdown]
# # Lab 12 · Checkpoints
#
# **30 minutes, 5 points.** You write sharded checkpoints that a crash cannot corrupt, and load them on any number of
# ranks.
#
# Each exercise has a check. The checks stop ranks in the middle of a save, and they fill up disks. They never judge
# times.

# %% tags=["nbval-ignore-output"]
from shared import ranks
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# %% [markdown]
# A run that saves every hour will be killed during a save, sooner or later. What it leaves behind must not be taken for
# a checkpoint, and the checkpoint before it must still be there. A name tells them apart: a checkpoint is written into
# `step_1000.half`, and it is renamed to `step_1000` when it is complete. On one file system, a rename happens
# completely or not at all.
#
# ## Exercise 12.1 · The newest checkpoint (5 min, 1 point)
#
# `newest_checkpoint(folder)` returns the path of the complete checkpoint with the largest step.
#
# - The name of a complete checkpoint is `step_`, followed by a number and nothing else. Ignore everything else in the
#   folder, including folders inside other folders.
# - It returns None if there is no checkpoint, and also if the folder does not exist.
#
# <details><summary>Hint</summary>
#
# Which is larger, `"step_9"` or `"step_10"`? And 9 or 10?
# </details>


# %% tags=["exercise", "export"] grade_id="newest-checkpoint"
# %%ranks
def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the largest step, or None if there is none."""
    ### BEGIN SOLUTION
    suffixes = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    steps = {path: int(suffix) for path, suffix in suffixes.items() if suffix.isdigit()}
    return max(steps, key=steps.get, default=None)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-newest-checkpoint" points=1
check.newest_checkpoint()

# %% [markdown]
# ## Exercise 12.2 · A checkpoint or none (15 min, 2 points)
#
# `save_checkpoint(folder, step, model, optimizer)` is called by all ranks. It writes one checkpoint:
#
# - `get_state_dict(model, optimizer)` returns the two states, with `DTensor`s in them.
#   `torch.distributed.checkpoint.save` lets each rank write its shard of `{"model": …, "optimizer": …, "step": step}`.
# - Let it write into `folder / f"step_{step}.half"`. When all ranks have written, one of them renames this folder to
#   `folder / f"step_{step}"`.
# - All ranks return after the rename.
# - First, it removes what an earlier attempt at the same step has left behind. It removes a complete checkpoint of the
#   same step only when the new one is ready to take its name.
# - If a rank fails to write, `save_checkpoint` raises on all ranks, and nothing is renamed.
#
# (An optimizer that has not taken a step has no state yet. In this case, `get_state_dict` makes it take a step with
# gradients of 0, which Adam counts. So do not save before the first step: this would change the training.)
#
# Target: each rank writes its own shard, and no rank gathers the shards of the others.
#
# <details><summary>Hint 1: who does what, and when?</summary>
#
# Three things must happen one after another: clearing, writing, renaming. Rank 0 can clear and rename alone. How do the
# others know that it has finished?
# </details>
# <details><summary>Hint 2: the same step again</summary>
#
# `rename` does not replace a folder that has files in it. If you delete that folder first and are killed halfway, part
# of it remains under the name of a complete checkpoint. Which name could it get before it is deleted?
# </details>


# %% tags=["exercise", "export"] grade_id="save-checkpoint"
# %%ranks
def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint that gets its final name only when it is complete. To be called by all ranks."""
    ### BEGIN SOLUTION
    complete, unfinished, replaced = (
        folder / f"step_{step}{suffix}" for suffix in ("", ".half", ".old")
    )
    if dist.get_rank() == 0:
        for leftover in (unfinished, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    dist.barrier()  # no rank may write before rank 0 has removed the leftovers
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=unfinished)  # if one rank fails, it raises on all ranks
    if dist.get_rank() == 0:
        if complete.exists():
            # A kill during a deletion would leave an incomplete checkpoint, so it must not have this name any more.
            complete.rename(replaced)
        unfinished.rename(complete)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()  # no rank may return before rank 0 has renamed the folder
    ### END SOLUTION


# %% tags=["check"] grade_id="check-save-checkpoint" points=2
check.save_checkpoint()

# %% [markdown]
# ## Exercise 12.3 · Resume on any number of ranks (10 min, 2 points)
#
# `load_checkpoint(path, model, optimizer)` restores the state of the model and the optimizer that was saved, and
# returns the step.
#
# - `torch.distributed.checkpoint.load(state, checkpoint_id=path)` loads into the tensors of `state`, in place. `state`
#   must have the same structure as the state that was saved. Values that are not tensors, such as the step, are
#   replaced in the dict.
# - `set_state_dict(model, optimizer, model_state_dict=…, optim_state_dict=…)` loads the two states into the model and
#   the optimizer. The optimizer's state contains settings too, such as the learning rate.
# - It works on any number of ranks, no matter how many ranks saved the checkpoint, and also if nothing is sharded.
#
# <details><summary>Hint</summary>
#
# You need a state with the right structure before you load. Which function of exercise 12.2 returns one?
# </details>


# %% tags=["exercise", "export"] grade_id="load-checkpoint"
# %%ranks
def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, which any number of ranks may have written. Returns its step."""
    ### BEGIN SOLUTION
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)  # fills the tensors in place and replaces the step
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-load-checkpoint" points=2
check.load_checkpoint()

# %%
ranks.stop()
