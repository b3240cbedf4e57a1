# Built by `make notebooks` from source/12_checkpoints/lab.py: edit that, not this.
"""Sharded checkpoints that no crash can corrupt, and that any number of ranks can load."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the largest step, or None if there is none."""
    suffixes = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    steps = {path: int(suffix) for path, suffix in suffixes.items() if suffix.isdigit()}
    return max(steps, key=steps.get, default=None)


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint that gets its final name only when it is complete. To be called by all ranks."""
    complete, unfinished, replaced = (folder / f"step_{step}{suffix}" for suffix in ("", ".half", ".old"))
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


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, which any number of ranks may have written. Returns its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)  # fills the tensors in place and replaces the step
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]
