# ---
# jupyter:
#   course:
#     module: checkpoints
#     minutes: 30
#     gpu_per_rank: true
# ---

# %% [markdown]
# # Lab 12 · Checkpoints
#
# **30 minutes, 5 points.** You write sharded checkpoints that a crash cannot spoil, and load them on any number of
# ranks.
#
# Each exercise has a check. The checks stop ranks in the middle of a save and let disks be full; they never judge
# times.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import checkpoints as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Sharded checkpoints that no crash can spoil, and that any number of ranks can load."""

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
# - A complete checkpoint is called `step_` and a number, and nothing else. Everything else in the folder is none of
#   your business, folders inside other folders included.
# - It returns None if there is no checkpoint, also if the folder does not exist.
#
# <details><summary>Hint</summary>
#
# Which is larger, `"step_9"` or `"step_10"`? And 9 or 10?
# </details>


# %% tags=["exercise", "export"] grade_id="newest-checkpoint"
# %%ranks
def newest_checkpoint(folder: Path) -> Path | None:
    """Find the complete checkpoint with the largest step."""
    ### BEGIN SOLUTION
    whole = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)
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
# - What an earlier try of the same step has left is removed first. A complete checkpoint of the same step is removed
#   only when the new one is ready to take its name.
# - If a rank fails to write, `save_checkpoint` raises on all ranks, and nothing is renamed.
#
# (An optimizer that has not taken a step has no state yet. `get_state_dict` then lets it take a step with gradients of
# 0, which Adam counts. So saving before the first step changes the training, and nobody needs it.)
#
# Target: each rank writes its own shard and no rank collects the others'.
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
    """Write a checkpoint that is complete or not there. To be called by all ranks."""
    ### BEGIN SOLUTION
    whole, half, old = (folder / f"step_{step}{end}" for end in ("", ".half", ".old"))
    if dist.get_rank() == 0:
        for left in (half, old):
            shutil.rmtree(left, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=half)
    if dist.get_rank() == 0:
        if whole.exists():
            whole.rename(old)  # deleted in place, a kill would leave a part of it under this name
        half.rename(whole)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    ### END SOLUTION


# %% tags=["check"] grade_id="check-save-checkpoint" points=2
check.save_checkpoint()

# %% [markdown]
# ## Exercise 12.3 · Resume on any number of ranks (10 min, 2 points)
#
# `load_checkpoint(path, model, optimizer)` brings model and optimizer to the state that was saved, and returns the
# step.
#
# - `torch.distributed.checkpoint.load(state, checkpoint_id=path)` fills the tensors of `state`, in place. `state` must
#   have the form that was saved. What is no tensor, such as the step, is put into the dict anew.
# - `set_state_dict(model, optimizer, model_state_dict=…, optim_state_dict=…)` hands the states back. The optimizer's
#   state contains settings too, such as the learning rate.
# - It works on any number of ranks, whatever number has saved, and also if nothing is sharded.
#
# <details><summary>Hint</summary>
#
# You need a state of the right form before you load. Which function of exercise 12.2 gives you one?
# </details>


# %% tags=["exercise", "export"] grade_id="load-checkpoint"
# %%ranks
def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Resume from a checkpoint that any number of ranks may have written. Returns its step."""
    ### BEGIN SOLUTION
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-load-checkpoint" points=2
check.load_checkpoint()

# %%
ranks.stop()
