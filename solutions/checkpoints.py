# Built by `make notebooks` from source/12_checkpoints/lab.py: edit that, not this.
"""Sharded checkpoints that no crash can spoil, and that any number of ranks can load."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the complete checkpoint with the largest step."""
    whole = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint that is complete or not there. To be called by all ranks."""
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


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Resume from a checkpoint that any number of ranks may have written. Returns its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]
